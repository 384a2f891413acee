"""Inference mode inside of a forward: no gradient passes, and what is computed there runs as elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx


class Distilled(nn.Module):
    """Learns what a teacher says, which does not learn.

    Args:
        how: in which way the teacher is kept from it.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.teacher, self.student, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how
        self.said: Any = None

    @torch.inference_mode()
    def ask(self, x: Tensor) -> Tensor:
        return self.teacher(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "decorator":
            said = self.ask(x)
        elif self.how == "nested":
            with torch.inference_mode():
                said = self.teacher(x)
                with torch.inference_mode(False):
                    learned = self.student(x).relu()
            return (learned - said.clone()).square().mean()
        else:
            with torch.inference_mode():
                said = self.teacher(x)
        self.said = said
        return (self.student(x) - said.clone()).square().mean()


def _converted(model: nn.Module, x: Tensor) -> Any:
    return autocastfx.convert(model, x, dtype="bfloat16")


def _first_call(model: nn.Module, x: Tensor) -> Any:
    return autocastfx.convert(model, dtype="bfloat16", weights="cached")


def _enabled(model: nn.Module, x: Tensor) -> Any:
    return autocastfx.enable(model, dtype="bfloat16")


@pytest.mark.parametrize("how", ["with", "decorator", "nested"])
@pytest.mark.parametrize("way", [_converted, _first_call, _enabled])
def test_the_teacher_gets_no_gradient(way: Callable[[nn.Module, Tensor], Any], how: str) -> None:
    torch.manual_seed(0)
    model, x = Distilled(how), torch.randn(4, 16)
    model(x).backward()
    assert model.student.weight.grad is not None
    wanted = model.student.weight.grad.clone()
    model.zero_grad()
    loss = way(model, x)(x)
    loss.backward()
    assert model.teacher.weight.grad is None
    assert model.said is None or not model.said.requires_grad
    assert (model.student.weight.grad - wanted).norm() <= 8 * torch.finfo(torch.bfloat16).eps * wanted.norm()


def test_a_teacher_runs_in_16_bits() -> None:
    x = torch.randn(4, 16)
    plan = _converted(Distilled("with"), x).plan
    runs = {node.module: str(node.placement.run) for node in plan.nodes if node.op == "linear"}
    assert runs == {"teacher": "low", "student": "low"}
