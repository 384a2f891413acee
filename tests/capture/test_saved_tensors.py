"""A first call inside activation checkpointing, or other hooks on saved tensors, captures as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from autocastfx import AmpModule, convert

LOW = torch.bfloat16


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8)), torch.randn(4, 8)


def gradients(amp_model: AmpModule, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [p.grad for p in amp_model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_call_inside_checkpoint(reentrant: bool) -> None:
    (model, x), (same, _) = made(), made()
    late, early = convert(model, dtype=LOW), convert(same, x, dtype=LOW)
    x.requires_grad_()
    torch.manual_seed(1)
    found = gradients(late, checkpoint(late, x, use_reentrant=reentrant).sum())
    torch.manual_seed(1)
    expected = gradients(early, early(x).sum())
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_hooks_see_the_tensors_of_the_call_alone() -> None:
    model, x = made()
    amp_model, seen = convert(model, dtype=LOW), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        seen.append(tensor.clone())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        amp_model(x)
        first = len(seen)
        amp_model(x)
    assert len(seen) == 2 * first
    assert all(type(one) is Tensor for one in seen)
