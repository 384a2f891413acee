"""Optimizers that step twice (SAM), written as public packages write them, under a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import LossScaleError, UnsupportedError


class SAM(torch.optim.Optimizer):
    """Moves the weights uphill by the gradients that there are, and steps with those at the new place."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        trained = self._parameters()
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        for p in trained:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._parameters():
            p.data = self.state[p]["before"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


X, Y = (torch.randn(32, size, generator=torch.Generator().manual_seed(size)) for size in (8, 1))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _trained(scale: Any, bad: int | None = None) -> tuple[list[Tensor], list[bool]]:
    """The weights after five steps, and which were skipped; of all evaluations one may give Inf."""
    model, count, skipped = _model(), 0, list[bool]()
    bare = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer: Any = bare if scale is None else autocastfx.LossScalingOptimizer(bare, scale)

    def closure() -> Tensor:
        nonlocal count
        loss = (model(X) - Y).square().mean() * (torch.inf if count == bad else 1.0)
        count += 1
        loss.backward() if scale is None else optimizer.backward(loss)
        return loss

    for _ in range(5):
        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        skipped.append(scale is not None and bool(optimizer.last_step.skipped))
    return [p.detach().clone() for p in model.parameters()], skipped


@pytest.mark.parametrize("scale", [2.0**16, 1.0])
def test_steps_are_those_without_a_scale(scale: float) -> None:
    found, skipped = _trained(autocastfx.StaticLossScale(scale))
    expected, _ = _trained(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(skipped)


@pytest.mark.parametrize("bad", [2, 3])
def test_an_overflow_of_either_half_skips_the_step(bad: int) -> None:
    found, skipped = _trained(autocastfx.DynamicLossScale(), bad)
    assert skipped == [False, True, False, False, False]
    assert all(weight.isfinite().all() for weight in found)


@pytest.mark.parametrize("half", ["first_step", "second_step"])
def test_halves_by_hand_are_refused(half: str) -> None:
    model = _model()
    optimizer = autocastfx.LossScalingOptimizer(SAM(model.parameters(), torch.optim.SGD, lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward((model(X) - Y).square().mean())
    with pytest.raises(LossScaleError, match=rf"{half} would read gradients .* call step\(closure\)"):
        getattr(optimizer, half)()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_grad_scaler_names_what_does_it() -> None:
    model, scaler = _model(), autocastfx.GradScaler("cpu")
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler.scale((model(X) - Y).square().mean()).backward()
    with pytest.raises(UnsupportedError, match=r"wrap it as LossScalingOptimizer\(SAM"):
        scaler.step(optimizer)
