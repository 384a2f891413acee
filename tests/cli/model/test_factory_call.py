from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from torch import nn

from autocastfx.cli.model import called, is_factory_call
from autocastfx.errors import ModelSpecError

FORM = "a model is package.module:factory"


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("called_by_name")

    def given(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    made.__dict__.update(given=given, model=nn.Identity(), space=types.SimpleNamespace(given=given), number=3)
    monkeypatch.setitem(sys.modules, "called_by_name", made)
    return made


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("given", ((), {})),
        ("given()", ((), {})),
        ("space.given(-2)", ((-2,), {})),
        (
            "given(2, 'a b', sizes=[3, 4], names={'x': None}, on=True,)",
            ((2, "a b"), {"sizes": [3, 4], "names": {"x": None}, "on": True}),
        ),
        ("given(')(', \"]<1\")", ((")(", "]<1"), {})),
    ],
)
def test_arguments_are_literals(spec: str, expected: tuple[Any, Any]) -> None:
    assert is_factory_call(f"called_by_name:{spec}")
    assert called(f"called_by_name:{spec}", FORM) == expected


@pytest.mark.parametrize(
    "brackets",
    [
        "(print(1))",
        "(__import__('os').remove('x'))",
        "(x)",
        "(*[1])",
        "(**{'a': 1})",
        "(a=1, a=2)",
        "(1)(2)",
        "(1) + (2)",
        "(1",
        "(f'{1}')",
        "(lambda: 1)",
        f"({'(' * 500}{')' * 500})",
        "(\0)",
    ],
)
def test_nothing_in_them_is_run(brackets: str) -> None:
    with pytest.raises(ModelSpecError, match=r"cannot read"):
        called(f"called_by_name:given{brackets}", FORM)


def test_a_model_that_stands_there_is_not_called(module: types.ModuleType) -> None:
    assert called("called_by_name:model", FORM) is module.model
    with pytest.raises(ModelSpecError, match="called_by_name:model is a model itself: leave the arguments out"):
        called("called_by_name:model(1)", FORM)
    with pytest.raises(ModelSpecError, match="called_by_name:number is a int: name a model, or something to call"):
        called("called_by_name:number", FORM)


@pytest.mark.parametrize(
    "spec", ["float32[8,3]", "x=int64[2]<9", "model.pt", "a:b:c", "a b:c", "C:\\x.pt", "m:", ":f", "m:f[1]"]
)
def test_what_is_no_call(spec: str) -> None:
    assert not is_factory_call(spec)
