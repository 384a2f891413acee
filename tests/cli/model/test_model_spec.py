"""Inputs from their dtypes and sizes. What cannot be read is tested with the command line."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from autocastfx.cli.model import load_function, load_inputs, load_model
from autocastfx.errors import ModelSpecError

CPU = torch.device("cpu")


def test_inputs_have_the_dtypes_sizes_and_names_asked_for() -> None:
    args, kwargs = load_inputs(["float32[2,3]", "float64[]", "mask=bool[2, 1]", "ids=int64[4,100]<7"], CPU)
    assert [(a.dtype, a.shape) for a in args] == [(torch.float32, (2, 3)), (torch.float64, ())]
    assert {name: (a.dtype, tuple(a.shape)) for name, a in kwargs.items()} == {
        "mask": (torch.bool, (2, 1)),
        "ids": (torch.int64, (4, 100)),
    }
    assert not kwargs["mask"].any()
    assert set(kwargs["ids"].flatten().tolist()) == set(range(7))


def test_inputs_are_the_same_each_time_and_differ_from_each_other() -> None:
    (a, b), _ = load_inputs(["float32[8]", "float32[8]"], CPU)
    (again, _), _ = load_inputs(["float32[8]", "float32[8]"], CPU)
    assert torch.equal(a, again)
    assert not torch.equal(a, b)


def test_integers_without_a_bound_are_zero() -> None:
    (ids,), _ = load_inputs(["int32[3]"], CPU)
    assert ids.tolist() == [0, 0, 0]


def test_inputs_are_made_on_the_device() -> None:
    (x,), _ = load_inputs(["float32[3]"], torch.device("meta"))
    assert x.device.type == "meta"


@pytest.mark.parametrize(
    "spec", ["float32", "float32[2,]", "float32[-1]", "float32[a]", "1x=float32[2]", "=float32[2]"]
)
def test_what_is_no_shape_is_refused(spec: str) -> None:
    with pytest.raises(ModelSpecError, match="cannot read the input"):
        load_inputs([spec], CPU)


def test_a_model_has_the_same_weights_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("spec_models")
    module.Nested = types.SimpleNamespace(make=lambda: nn.Linear(3, 3))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_models", module)
    first, second = load_model("spec_models:Nested.make"), load_model("spec_models:Nested.make")
    assert first is not second
    assert torch.equal(first.weight, second.weight)  # type: ignore[arg-type]


def test_a_function_is_what_its_factory_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("spec_models")
    module.__dict__.update(metric=lambda: len, limit=lambda: 3)
    monkeypatch.setitem(sys.modules, "spec_models", module)
    assert load_function("spec_models:metric", "a metric") is len
    with pytest.raises(
        ModelSpecError, match="spec_models:limit gave a int: the factory of a metric returns a function"
    ):
        load_function("spec_models:limit", "a metric")
