"""Observers of a converted model's calls see each node's values, and change nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import autocastfx

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def amp_model() -> autocastfx.AmpModule:
    return autocastfx.convert(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), (X,), dtype=torch.bfloat16)


class Seen:
    """An observer that keeps what it is shown."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.reads: dict[str, list[Any]] = {}

    def __call__(self, node: fx.Node, value: Any, read: Sequence[Any]) -> None:
        self.values[node.name], self.reads[node.name] = value, list(read)


def test_an_observer_sees_each_computing_node_and_what_it_read(amp_model: autocastfx.AmpModule) -> None:
    expected, seen = amp_model(X), Seen()
    with amp_model._observed_by(seen):
        result = amp_model(X)
    assert torch.equal(result, expected)
    assert list(seen.values) == [node.name for node in amp_model.graph.nodes if node.op == "call_function"]
    assert seen.values["softmax"] is result
    assert seen.reads["softmax"][0] is seen.values["linear"]
    assert seen.values["linear"].dtype == torch.bfloat16


def test_two_observers_at_once_both_see_and_neither_sees_afterwards(amp_model: autocastfx.AmpModule) -> None:
    first, second = Seen(), Seen()
    with amp_model._observed_by(first):
        with amp_model._observed_by(second):
            amp_model(X)
        assert list(first.values) == list(second.values) != []
        second.values.clear()
        amp_model(X)
        assert not second.values
    first.values.clear()
    amp_model(X)
    assert not first.values


def test_an_observer_is_gone_after_an_error(amp_model: autocastfx.AmpModule) -> None:
    with pytest.raises(ZeroDivisionError), amp_model._observed_by(Seen()):
        raise ZeroDivisionError
    assert amp_model._observers == ()


def test_copies_are_not_observed(amp_model: autocastfx.AmpModule) -> None:
    seen = Seen()
    with amp_model._observed_by(seen):
        for made in (copy.deepcopy(amp_model), copy.copy(amp_model)):
            made(X)
        assert not seen.values
    with amp_model._observed_by(len):  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(amp_model))._observers == ()
