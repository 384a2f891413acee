"""Which numbers, written in the place of some scores, only hide them, whatever they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autocastfx.passes.analysis.value_ranges import fills, largest_mask
from tests.decided import traced

LEAST = torch.finfo(torch.float32).min
Form = Callable[[Tensor, Tensor], Any]


def found(function: Form, low: torch.dtype = torch.float16) -> dict[str, tuple[str, float]]:
    """The fills of ``function`` of scores and of what is to be kept: by node, the argument and the number."""
    inputs = torch.rand(2, 4, 4), torch.ones(2, 4, 4, dtype=torch.bool)
    graph = traced(function, *inputs)
    return {node.name: (fill.argument, fill.number) for node, fill in fills(graph, largest_mask(low)).items()}


def attend(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask)


WHERE = {"where": ("other", -1e9)}
HIDING: dict[str, tuple[Form, dict[str, tuple[str, float]]]] = {
    "other": (lambda x, keep: torch.where(keep, x, -1e9).softmax(-1), WHERE),
    "self": (lambda x, keep: torch.where(~keep, 1e9, x).softmax(-1), {"where": ("self", 1e9)}),
    "masked_fill": (lambda x, keep: x.masked_fill(~keep, -1e9).softmax(-1), {"masked_fill": ("value", -1e9)}),
    "a whole number": (lambda x, keep: x.masked_fill(~keep, -(10**9)).softmax(-1), {"masked_fill": ("value", -1e9)}),
    "attention": (lambda x, keep: attend(x, torch.where(keep, x, -1e9)), WHERE),
    "a copy": (lambda x, keep: attend(x, torch.where(keep, x, -1e9).mT.contiguous().clone()[:, :4]), WHERE),
    "added": (lambda x, keep: (x + torch.where(keep, x, -1e9)).softmax(-1), WHERE),
    "subtracted": (lambda x, keep: (x - torch.where(keep, x, -1e9)[None]).softmax(-1), WHERE),
    "a product and it": (lambda x, keep: torch.baddbmm(torch.where(keep, x, -1e9), x, x, alpha=2).softmax(-1), WHERE),
    "its size": (lambda x, keep: (lambda y: (y.softmax(-1), x.view(y.shape)))(torch.where(keep, x, -1e9)), WHERE),
    "two readers": (lambda x, keep: (lambda y: y.softmax(-1) + attend(x, y))(torch.where(keep, x, -1e9)), WHERE),
    "widened": (lambda x, keep: torch.where(keep, x, -1e9).double().softmax(-1), WHERE),
    "twice": (
        lambda x, keep: torch.where(keep, x, -1e9).masked_fill(keep.mT, -1e9).softmax(-1),
        {**WHERE, "masked_fill": ("value", -1e9)},
    ),
    "over a number in range": (lambda x, keep: x.masked_fill(keep, -1e4).where(keep.mT, -1e9).softmax(-1), WHERE),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_number_that_only_hides_scores_is_a_fill(name: str) -> None:
    function, expected = HIDING[name]
    assert found(function) == expected


def _changed_later(x: Tensor, keep: Tensor) -> Tensor:
    y = torch.where(keep, x, -1e9)
    weights = y.softmax(-1)
    y.view(-1).add_(1.0)
    return weights


OTHERWISE: dict[str, Form] = {
    "an output": lambda x, keep: torch.where(keep, x, -1e9),
    "an output, too": lambda x, keep: (lambda y: (y.softmax(-1), y[0]))(torch.where(keep, x, -1e9)),
    "a sum that is an output": lambda x, keep: torch.where(keep, x, -1e9) + x,
    "multiplied": lambda x, keep: (torch.where(keep, x, -1e9) * 0.5).softmax(-1),
    "added in another measure": lambda x, keep: torch.add(x, torch.where(keep, x, -1e9), alpha=2).softmax(-1),
    "added to itself": lambda x, keep: (lambda y: (y + y).softmax(-1))(torch.where(keep, x, -1e9)),
    "compared": lambda x, keep: (lambda y: (y.softmax(-1), y > 0))(torch.where(keep, x, -1e9)),
    "a view read otherwise": lambda x, keep: (lambda y: (y.softmax(-1), y.mT.relu()))(torch.where(keep, x, -1e9)),
    "a query": lambda x, keep: F.scaled_dot_product_attention(torch.where(keep, x, -1e9), x, x),
    "cast to whole numbers": lambda x, keep: (lambda y: (y.softmax(-1), y.long()))(torch.where(keep, x, -1e9)),
    "told how far below": lambda x, keep: torch.where(keep, x, -1e9).log_softmax(-1),
    "a largest score": lambda x, keep: torch.where(keep, x, -1e9).amax(-1),
    "changed later": _changed_later,
    "in place": lambda x, keep: (x + 1).masked_fill_(~keep, -1e9).softmax(-1),
    "no float32 value beside it": lambda x, keep: attend(x, torch.where(keep, 0.0, -1e9)),
    "infinite": lambda x, keep: torch.where(keep, x, -math.inf).softmax(-1),
    "another number in the same place": lambda x, keep: (
        torch.where(keep, x, -1e9).masked_fill(keep.mT, -1e20).softmax(-1)
    ),
    "another number in a sum": lambda x, keep: (torch.where(keep, x, -1e9) + x.masked_fill(keep.mT, -1e20)).softmax(-1),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_read_otherwise_is_none(name: str) -> None:
    assert found(OTHERWISE[name]) == {}


def test_one_number_that_is_read_otherwise_spoils_those_that_it_meets() -> None:
    def function(x: Tensor, keep: Tensor) -> Any:
        first = x.masked_fill(keep, -1e9)
        return first, torch.where(keep.mT, first, -1e20).softmax(-1)

    assert found(function) == {"where": ("other", -1e20)}  # beside a value beyond the range, which classify sees


def test_a_number_counts_from_where_it_leaves_no_room_for_a_score() -> None:
    def function(x: Tensor, keep: Tensor) -> Tensor:
        return (x + torch.where(keep, x, -65504.0)).softmax(-1)

    assert found(function) == {"where": ("other", -65504.0)}
    assert found(function, torch.bfloat16) == {}
    assert found(lambda x, keep: torch.where(keep, x, -32752.0).softmax(-1)) == {}
    assert found(lambda x, keep: torch.where(keep, x, LEAST).softmax(-1), torch.bfloat16) == {"where": ("other", LEAST)}
