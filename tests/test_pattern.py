"""Each formula of a pattern is what its operator computes, and names choose patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autocastfx.pattern import PATTERNS, Pattern, chosen

CASES = [(pattern, formula) for pattern in PATTERNS for formula in pattern.formulas]


@pytest.mark.parametrize(("pattern", "formula"), CASES, ids=[f"{p.name}-{i}" for i, (p, _) in enumerate(CASES)])
def test_a_formula_and_its_operator_agree_in_float64(pattern: Pattern, formula: Callable[[Any], Any]) -> None:
    x = torch.linspace(-9, 9, 401, dtype=torch.float64, requires_grad=True)
    written, one = formula(x), pattern.target(x, **pattern.kwargs)
    # A hundred roundings of numbers below 100, which is what the terms of the derivative reach.
    bound = {"rtol": 0.0, "atol": 100 * 100 * torch.finfo(torch.float64).eps}
    torch.testing.assert_close(written, one, **bound)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (written, one)), **bound)


def test_true_is_all_and_false_is_none() -> None:
    assert chosen(True) == chosen(["tanh_gelu"]) == tuple(p.name for p in PATTERNS) == ("tanh_gelu",)
    assert chosen(False) == chosen(()) == ()


@pytest.mark.parametrize(
    ("recompose", "message"),
    [
        (["tanh_gelu", "gelu"], "there is no pattern 'gelu'; the patterns are tanh_gelu$"),
        ("tanh_gelu", r"a sequence of names: give \('tanh_gelu',\), not 'tanh_gelu'"),
    ],
)
def test_what_is_no_choice_is_refused(recompose: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(recompose)
