"""Forward looks for something that is not there, or empty. Once it is there, the converted model reads it."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from tests.helpers import TORCH

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
VARIABLE = "AUTOCASTFX_TEST_GUARDS"
MODULE = ModuleType("settings_of_test_guards")


class Settings:
    pass


class Base:
    scale = 1.0

    def read(self) -> float:
        return self.scale


class Derived(Base):
    pass


class Falling:
    """An object whose ``__getattr__`` reads another attribute, if it is there."""

    def __getattr__(self, name: str) -> float:
        if name == "scale":
            return self.__dict__.get("own", 1.0)
        raise AttributeError(name)


class Table(MutableMapping[str, float]):
    def __init__(self) -> None:
        self.rows: dict[str, float] = {}

    def __getitem__(self, key: str) -> float:
        return self.rows[key]

    def __setitem__(self, key: str, value: float) -> None:
        self.rows[key] = value

    def __delitem__(self, key: str) -> None:
        del self.rows[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class Wrapping:
    """Has the attributes of another object, and its own before them."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(scale=1.0)

    def __getattr__(self, name: str) -> float:
        return getattr(self.__dict__["inner"], name)


class Model(nn.Module):
    def __init__(self, function: Callable[[Any], float], read: Any) -> None:
        super().__init__()
        self.linear, self.function, self.read = nn.Linear(16, 16), function, read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.function(self.read)


def key(read: Any) -> float:
    try:
        return read["scale"]
    except KeyError:
        return 1.0


def inner_key(read: Any) -> float:
    try:
        return read["inner"]["scale"]
    except KeyError:
        return 1.0


def attribute(read: Any) -> float:
    try:
        return read.scale
    except AttributeError:
        return 1.0


def of_module(_: Any) -> float:
    try:
        return MODULE.scale
    except AttributeError:
        return 1.0


def set_key(read: Any) -> None:
    read["scale"] = 4.0


def set_attribute(read: Any) -> None:
    read.scale = 4.0


def set_variable(_: Any) -> None:
    os.environ[VARIABLE] = "4"


def has(read: Any) -> float:
    return 4.0 if "scale" in read else 1.0


def is_filled(read: Any) -> float:
    return 4.0 if read else 1.0


def of_vars(read: Any) -> float:
    return vars(read).get("scale", 1.0)


def named(read: Any) -> float:
    return 4.0 if "scale" in read.__dict__ else 1.0


# What makes the thing that forward reads, how it reads it, and what changes it.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "a key": (dict, key, set_key),
    "a key of an inner dictionary": (lambda: {"inner": {}}, inner_key, lambda read: set_key(read["inner"])),
    "a key of an ordered dictionary": (OrderedDict, key, set_key),
    "a key of a default dictionary": (lambda: defaultdict(lambda: 1.0), lambda read: read.get("scale", 1.0), set_key),
    "a key of a user's dictionary": (UserDict, key, set_key),
    "a key of a mapping": (Table, lambda read: read.get("scale", 1.0), set_key),
    "in a mapping": (Table, has, set_key),
    "an attribute": (SimpleNamespace, attribute, set_attribute),
    "an attribute of a class": (Settings, attribute, lambda read: set_attribute(type(read))),
    "an attribute that a class inherits": (Derived, attribute, lambda read: set_attribute(Derived)),
    "a method that a class inherits": (
        Derived,
        lambda read: read.read(),
        lambda read: setattr(Derived, "read", lambda self: 4.0),
    ),
    "an attribute of a module": (lambda: nn.Linear(2, 2), attribute, set_attribute),
    "an attribute of a tensor": (lambda: torch.zeros(1), attribute, set_attribute),
    "an attribute of a Python module": (lambda: MODULE, of_module, set_attribute),
    "an attribute by default": (lambda: MODULE, lambda read: getattr(MODULE, "scale", 1.0), set_attribute),
    "an attribute by __getattr__": (Falling, attribute, lambda read: setattr(read, "own", 4.0)),
    "an attribute before that of __getattr__": (Wrapping, lambda read: read.scale, set_attribute),
    "a variable of the environment": (dict, lambda _: float(os.environ.get(VARIABLE, "1")), set_variable),
    "a variable of the environment, by os.getenv": (dict, lambda _: float(os.getenv(VARIABLE, "1")), set_variable),
    "vars": (SimpleNamespace, of_vars, set_attribute),
    "in __dict__": (SimpleNamespace, named, set_attribute),
    "an empty dictionary": (dict, is_filled, set_key),
    "an empty ordered dictionary": (OrderedDict, is_filled, set_key),
}


NEWER = ("an attribute of a tensor", "an attribute by __getattr__", "vars", "in __dict__")


@pytest.fixture(autouse=True)
def without_attributes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    os.environ.pop(VARIABLE, None)
    for owner, name in ((MODULE, "scale"), (Settings, "scale"), (Derived, "scale"), (Derived, "read")):
        if name in vars(owner):
            delattr(owner, name)


@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize("name", CASES)
def test_what_was_absent_is_read_once_it_is_there(name: str, way: str) -> None:
    if TORCH < (2, 13) and name in NEWER:
        pytest.skip("Dynamo of torch 2.11 has no place where this could be guarded")
    make, function, change = CASES[name]
    read = make()
    model = Model(function, read)
    amp_model: Any = getattr(autocastfx, way)(model, dtype="bfloat16")
    assert function(read) == 1.0
    before = amp_model(X)
    assert amp_model(X).equal(before)
    change(read)
    assert function(read) == 4.0
    assert amp_model(X).equal(4 * before)


def test_code_that_finds_nothing_is_captured_once() -> None:
    amp_model = autocastfx.convert(Model(key, {}), dtype="bfloat16")
    for _ in range(3):
        amp_model(X)
    assert len(amp_model.variants) == 1


class Stored:
    """A descriptor that keeps its value in the object."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else vars(owner)["stored"]

    def __set__(self, owner: Any, value: float) -> None:
        vars(owner)["stored"] = value


class Described(nn.Module):
    scale = Stored()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.skipif(TORCH < (2, 13), reason="with torch 2.11 it is refused")
@pytest.mark.parametrize("way", ["convert", "enable"])
def test_a_descriptor_of_the_class_of_a_module_is_read(way: str) -> None:
    model = Described()
    amp_model: Any = getattr(autocastfx, way)(model, dtype="bfloat16")
    before = amp_model(X)
    model.scale = 4.0
    assert amp_model(X).equal(4 * before)
