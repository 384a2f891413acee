"""A value that a model returns and reads itself: gradients come through what is returned, whatever its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.runtime.operators.casts import through

EPS = torch.finfo(torch.bfloat16).eps


class Features(nn.Module):
    """Shows its features beside what it makes of them.

    Args:
        how: where they are shown, and what is done with them.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how
        self.shown: Any = None

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        if self.how == "written":
            h.mul_(0.5)
        if self.how == "view":
            h = h.view(4, 2, 8).flatten(1)
        self.shown = h if self.how == "attribute" else None
        y = self.head(h) + nn.functional.gelu(h)
        return y if self.how in ("attribute", "hook") else {"h": h, "y": y} if self.how == "dict" else (h, y)


def features_and_result(model: nn.Module, run: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []
    handle = model.body.register_forward_hook(lambda *given: seen.append(given[-1])) if model.how == "hook" else None
    output = run(x)
    if handle is not None:
        handle.remove()
        return seen[-1], output
    if model.how == "attribute":
        return model.shown, output
    return tuple(output.values()) if isinstance(output, dict) else output


def _converted(model: nn.Module, x: Tensor, **options: Any) -> Any:
    return autocastfx.convert(model, x, dtype="bfloat16", **options)


def _enabled(model: nn.Module, x: Tensor, **options: Any) -> Any:
    return autocastfx.enable(model, dtype="bfloat16", **options)


WAYS = pytest.mark.parametrize("way", [_converted, _enabled])
HOWS = pytest.mark.parametrize("how", ["tuple", "dict", "attribute", "view", "hook"])


@WAYS
@HOWS
@pytest.mark.filterwarnings("ignore::autocastfx.errors.StateWarning")
def test_the_gradient_of_what_is_returned_is_there_and_can_be_changed(way: Callable[..., Any], how: str) -> None:
    torch.manual_seed(0)
    model, x, weight = Features(how), torch.randn(4, 16), torch.randn(4, 16)
    runs, gradients = [model, way(model, x)], list[list[Tensor]]()
    for run in runs if way is _converted else runs[1:]:
        model.zero_grad()
        h, y = features_and_result(model, run, x)
        h.retain_grad()
        h.register_hook(lambda grad: grad * -2)  # reverses gradients
        (y * weight).sum().backward()
        assert h.grad is not None
        assert h.grad.dtype == h.dtype == torch.float32
        gradients.append([h.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    if way is _converted:
        assert len(gradients[0]) == 5
        for ours, theirs in zip(*reversed(gradients), strict=True):
            assert (ours - theirs).norm() <= 4 * EPS * theirs.norm()
    h, y = features_and_result(model, runs[-1], x)
    (of_features,) = torch.autograd.grad(y.sum(), h)
    assert of_features.abs().sum() > 0


@WAYS
def test_a_loss_of_both_adds_both_gradients(way: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = Features("tuple"), torch.randn(4, 16)
    h, y = model(x)
    wanted = torch.autograd.grad(h.square().sum() + y.square().sum(), list(model.parameters()))
    h, y = way(model, x)(x)
    found = torch.autograd.grad(h.square().sum() + y.square().sum(), list(model.parameters()))
    assert all((a - b).norm() <= 4 * EPS * b.norm() for a, b in zip(found, wanted, strict=True))


def test_gradients_of_gradients_pass_too() -> None:
    torch.manual_seed(0)
    model, x = Features("tuple"), torch.randn(4, 16)
    found: list[Tensor] = []
    for run in (model, _converted(model, x)):
        h, y = run(x)
        (first,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), model.head.weight)
    assert (found[1] - found[0]).norm() <= 8 * EPS * found[0].norm()


def test_what_is_written_into_afterwards_is_right_or_refused() -> None:
    torch.manual_seed(0)
    model, x = Features("written"), torch.randn(4, 16)
    h, y = model(x)
    wanted = torch.autograd.grad(y.sum() + h.sum(), list(model.parameters()))
    h, y = _converted(model, x)(x)
    found = torch.autograd.grad(y.sum() + h.sum(), list(model.parameters()))
    assert all((a - b).norm() <= 4 * EPS * b.norm() for a, b in zip(found, wanted, strict=True))


def test_nothing_is_copied_and_without_gradients_nothing_is_done() -> None:
    low = torch.randn(4, 16, requires_grad=True).to(torch.bfloat16)
    wide = low.float()
    passed = through(low, wide)
    assert passed.data_ptr() == low.data_ptr()
    assert passed.grad_fn is not None
    passed.mul_(0.5)  # may be written into
    with torch.no_grad():
        assert through(low, wide) is low
    assert through(low.detach(), wide.detach()) is not passed


@pytest.mark.parametrize("options", [{"weights": "cached"}, {"fold": "kernel"}, {"dtype": "float16"}])
def test_with_other_options_it_is_the_same(options: dict[str, Any]) -> None:
    model, x = Features("tuple"), torch.randn(4, 16)
    h, y = autocastfx.convert(model, x, **{"dtype": "bfloat16", **options})(x)
    called: list[Tensor] = []
    h.register_hook(called.append)
    y.sum().backward()
    assert len(called) == 1
