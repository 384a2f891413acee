"""torch.equal and torch.allclose: a Python bool comes out of the converted model, from its own inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError

ONES = torch.ones(2, 8)
NAN = torch.tensor([[1.0, float("nan")]])


class Compares(nn.Module):
    """A product, and whether the comparison of two inputs holds."""

    def __init__(self, comparison: Callable[..., Any]) -> None:
        super().__init__()
        self.comparison = comparison

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, bool]:
        return x @ y.mT, self.comparison(x, y)


class Branches(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if torch.equal(x, y) else x - y


COMPARISONS: dict[str, Callable[..., Any]] = {
    "equal": torch.equal,
    "method equal": Tensor.equal,
    "equal after promotion": lambda x, y: torch.equal(x, y.double()),
    "equal of what has other sizes": lambda x, y: torch.equal(x, y[:, :1]),
    "allclose": torch.allclose,
    "method allclose": Tensor.allclose,
    "allclose broadcasts": lambda x, y: torch.allclose(x, y[:1]),
    "allclose with an absolute tolerance": partial(torch.allclose, atol=0.5),
    "allclose with a relative tolerance": partial(torch.allclose, rtol=0.5),
    "allclose of NaN": partial(torch.allclose, equal_nan=True),
}
PAIRS = {
    "same": (ONES, ONES.clone()),
    "near": (ONES, ONES + 0.25),
    "far": (ONES, ONES + 2),
    "NaN": (NAN, NAN.clone()),
}


@pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)
def test_answers_as_the_model_does_for_other_inputs_too(comparison: Callable[..., Any]) -> None:
    model = Compares(comparison)
    amp_model = autocastfx.convert(model, PAIRS["near"], dtype=torch.bfloat16)
    for x, y in PAIRS.values():
        _, answer = amp_model(x, y)
        assert isinstance(answer, bool)
        assert answer is model(x, y)[1]


def test_the_comparison_reads_float32_where_the_model_does() -> None:
    """Two numbers that bfloat16 cannot tell apart."""
    amp_model = autocastfx.convert(Compares(torch.equal), PAIRS["same"], dtype=torch.bfloat16)
    product, answer = amp_model(ONES, ONES + 2**-10)
    assert answer is False
    assert torch.equal(product, ONES @ ONES.mT)


def test_a_branch_on_it_is_refused_with_advice() -> None:
    with pytest.raises(CaptureError, match=r"(?s)Branches cannot be captured.*torch\.where, torch\.cond or"):
        autocastfx.convert(Branches(), PAIRS["same"], dtype="float16")


def test_the_module_level_functions_are_as_they_were() -> None:
    functions = torch.equal, torch.allclose
    autocastfx.convert(Compares(torch.equal), PAIRS["same"], dtype="float16")
    assert (torch.equal, torch.allclose) == functions
    assert torch.equal(ONES, ONES.clone())
