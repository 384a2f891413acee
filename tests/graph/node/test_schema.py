"""What schemas say of arguments."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from autocastfx.graph.node import schema

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "numbers", "written", "shared"),
    [
        (aten.add.Tensor, {"self", "other", "alpha"}, set(), set()),
        (aten.add_.Scalar, {"self", "other", "alpha"}, {"self"}, {"self"}),
        (aten.clamp.default, {"self", "min", "max"}, set(), set()),
        (aten.transpose.int, {"self"}, set(), {"self"}),
        (aten.copy_.default, {"self", "src"}, {"self"}, {"self"}),
        (aten.cat.default, set(), set(), set()),
        (aten.dropout.default, {"input", "p"}, set(), set()),
    ],
)
def test_names_of_arguments(op: OpOverload, numbers: set[str], written: set[str], shared: set[str]) -> None:
    found = schema(op)
    assert found.names == tuple(a.name for a in op._schema.arguments)
    assert (found.numbers, found.written, found.shared) == (numbers, written, shared)
    assert schema(op) is found


def test_what_is_written_without_being_returned_is_not_shared() -> None:
    found = schema(torch.ops.aten._foreach_add_.Scalar)
    assert (found.written, found.shared) == ({"self"}, frozenset())
