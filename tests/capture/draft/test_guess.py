"""What is found out about inputs by running operators on stand-ins."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from autocastfx.capture.draft.guess import ANY, Guess, StandIns
from autocastfx.graph.node import value

aten = torch.ops.aten
F32, I64, BOOL = torch.float32, torch.int64, torch.bool


class Trace:
    """A graph under construction."""

    def __init__(self, hints: dict[str, Guess] | None = None) -> None:
        self.graph, self.known = fx.Graph(), StandIns(hints if hints is not None else {})

    def input(self, name: str, guess: Guess = ANY) -> fx.Node:
        node = self.graph.placeholder(name)
        self.known.begin(node, guess)
        return node

    def weight(self, *shape: int, dtype: torch.dtype = F32) -> fx.Node:
        node = self.graph.get_attr("w")
        self.known.begin(node, Guess.of(torch.empty(shape, dtype=dtype)))
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        self.known.infer(node)
        return node

    def found(self, node: fx.Node) -> tuple[torch.dtype | None, int | None]:
        guess = self.known.guess(node)
        return guess.dtype, guess.rank


@pytest.fixture
def trace() -> Trace:
    return Trace()


def test_nothing_is_known_of_an_input(trace: Trace) -> None:
    x = trace.input("x")
    assert trace.found(x) == (None, None)
    assert value(x).dtype == F32, "the likeliest"


def test_a_weight_tells_the_dtype_and_leaves_the_dimensions_open(trace: Trace) -> None:
    x = trace.input("x")
    y = trace.call(aten.linear.default, x, trace.weight(5, 3))
    assert trace.found(x) == (F32, None)
    assert trace.found(y) == (F32, None)
    assert trace.found(trace.call(aten.linear.default, trace.input("z"), trace.weight(2, 2, dtype=torch.float64)))[
        0
    ] == (torch.float64)


def test_an_input_of_a_convolution_has_a_batch(trace: Trace) -> None:
    x = trace.input("x")
    y = trace.call(aten.conv2d.default, x, trace.weight(8, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], 2)
    assert trace.found(x) == trace.found(y) == (F32, 4)


def test_indices_and_masks_are_no_floats(trace: Trace) -> None:
    ids, keep, x = trace.input("ids"), trace.input("keep"), trace.input("x")
    y = trace.call(aten.embedding.default, trace.weight(9, 4), ids)
    trace.call(aten.masked_fill.Scalar, x, keep, 0.0)
    assert trace.found(ids)[0] == I64
    assert trace.found(y)[0] == F32
    assert trace.found(keep)[0] == BOOL
    assert trace.found(x)[0] is None


def test_what_cannot_be_a_float_is_not_taken_for_one(trace: Trace) -> None:
    mask = trace.input("mask")
    trace.call(aten.bitwise_not.default, mask)
    assert set(trace.known.guess(mask).dtypes) == {I64, BOOL}


def test_results_of_fixed_dtype(trace: Trace) -> None:
    x = trace.input("x")
    assert trace.found(trace.call(aten.gt.Scalar, x, 0))[0] == BOOL
    assert trace.found(trace.call(aten.argmax.default, x))[0] == I64
    assert trace.found(trace.call(aten.to.dtype, x, torch.float64))[0] == torch.float64
    assert trace.found(trace.call(aten.sin.default, x))[0] is None


def test_members_of_a_tuple(trace: Trace) -> None:
    best = trace.call(aten.max.dim, trace.input("x", Guess((F32,))), 1)
    assert trace.found(trace.call(operator.getitem, best, 0)) == (F32, None)
    assert trace.found(trace.call(operator.getitem, best, 1)) == (I64, None)


def test_what_fits_no_stand_in_meets_in_the_widest_dtype(trace: Trace) -> None:
    x, w = trace.input("x", Guess((F32,), (2,))), trace.weight(2, dtype=torch.float64)
    y = trace.call(aten.view_as_complex.default, x)
    assert trace.found(y)[0] == F32, "a last dimension of 2 is no size of 1"
    assert trace.known.guess(trace.call(aten.linalg_solve.default, x, w)).dtypes == (torch.float64,)


def test_views_share_their_storage(trace: Trace) -> None:
    x = trace.input("x", Guess((F32,), (2,)))
    y, z = trace.call(aten.transpose.int, x, 0, 1), trace.call(aten.neg.default, x)
    storages = [value(node).untyped_storage()._cdata for node in (x, y, z)]
    assert storages[0] == storages[1] != storages[2]


def test_what_one_trace_finds_out_helps_the_next() -> None:
    hints: dict[str, Guess] = {}
    first = Trace(hints)
    x = first.input("x")
    first.call(aten.relu.default, x)
    assert not first.known.is_late
    first.call(aten.conv1d.default, x, first.weight(1, 1, 1))
    assert first.known.is_late, "relu has been judged already"
    second = Trace(hints)
    x = second.input("x")
    assert second.found(x) == second.found(second.call(aten.relu.default, x)) == (F32, 3)


def test_guesses_that_contradict_do_not_empty_each_other() -> None:
    assert Guess((F32,), (2,)).narrowed(Guess((I64,), (2, 3))) == Guess((F32,), (2,))
    assert ANY.narrowed(Guess((I64, F32), (5, 2))) == Guess((F32, I64), (2, 5))
    assert len(list(ANY.each())) == len(ANY.dtypes) * len(ANY.ranks)
