"""Which values share storage that is written to, and which do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import autocastfx
from autocastfx.graph.alias import alias_sets
from autocastfx.plan.plan import Precision
from tests.decided import traced
from tests.helpers import Function

X = torch.rand(8, 8)


def sets(function: Callable[..., object]) -> set[frozenset[str]]:
    return {frozenset(node.name for node in one.members) for one in alias_sets(traced(function, X)).values()}


def written_apart(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.tanh()
    y.add_(1)
    return y, (x @ x).relu() @ x


def test_a_write_concerns_what_shares_the_storage_alone() -> None:
    assert sets(written_apart) == {frozenset({"tanh", "add_"})}
    assert sets(lambda x: (x.tanh().add_(1), x.exp().mul_(2))) == {
        frozenset({"tanh", "add_"}),
        frozenset({"exp", "mul_"}),
    }
    plan = autocastfx.convert(Function(written_apart), (X,), dtype=torch.bfloat16).plan
    assert plan["relu"].placement.run is Precision.LOW


def test_views_share_it_with_what_they_show() -> None:
    def through_views(x: Tensor) -> Tensor:
        y = x.tanh()
        whole, row = y.view(-1), y[0]
        row.add_(1)
        return whole + y.exp().view(-1)

    assert sets(through_views) == {frozenset({"tanh", "view", "select", "add_"})}


def test_without_a_write_there_is_no_set() -> None:
    assert sets(lambda x: x.view(-1) + 1) == set()
