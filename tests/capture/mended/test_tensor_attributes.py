"""Attributes that a tensor class gives on in its ``__torch_function__``, as those of packages for images do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from tests.helpers import Net

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


def net() -> nn.Module:
    return Net(lambda m, x: torch.relu(m.linear(torch.relu(x))), linear=nn.Linear(16, 16))


def class_that(gives_on: Callable[[Any, Any], None]) -> Any:
    """Make a class that does this with each result and the first argument of what gave it."""

    class Image(Tensor):
        @property
        def flag(self) -> Any:
            return self._flag

        @flag.setter
        def flag(self, value: Any) -> None:
            self._flag = value

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(found, Image) and args and isinstance(args[0], Image):
                gives_on(found, args[0])
            return found

    return Image


def _each(found: Any, given: Any) -> None:
    for name, value in given.__dict__.items():
        setattr(found, name, value)


def _one(found: Any, given: Any) -> None:
    if "label" in given.__dict__:
        found.label = given.__dict__["label"]


def _counted(found: Any, given: Any) -> None:
    found.__dict__["count"] = given.__dict__.get("count", 0) + 1


def _noted_in_what_is_given(found: Any, given: Any) -> None:
    given.__dict__["seen"] = True
    found.__dict__.update(given.__dict__)


def _all_but_one(found: Any, given: Any) -> None:
    vars(found).update(vars(given))
    if "label" in found.__dict__:
        del found.__dict__["label"]


def _by_a_property(found: Any, given: Any) -> None:
    found.flag = given.__dict__.get("_flag", 0) + 1
    found.__dict__["seen"] = found.__dict__["_flag"]


def _set_while_the_table_is_held(found: Any, given: Any) -> None:
    table = found.__dict__
    found.label = 3
    table["seen"] = "label" in table


def _as_monai(found: Any, given: Any) -> None:
    found.flag = 1
    table = given.__dict__
    found.__dict__.update({n: table[n].copy() if isinstance(table[n], list) else table[n] for n in table})


FOLLOWED = (
    *(_each, _one, _counted, _noted_in_what_is_given, _all_but_one, _by_a_property, _set_while_the_table_is_held),
    _as_monai,
)
CALLS: tuple[dict[str, Any], ...] = (
    *({"label": "a"}, {"label": "b"}, {"label": "a", "more": [1, 2]}, {}, {"count": 5, "_flag": 2}),
    {"more": torch.ones(2)},
)


def _told(tensor: Any) -> tuple[type, str]:
    return type(tensor), repr(sorted(tensor.__dict__.items(), key=lambda item: item[0]))


@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize("gives_on", FOLLOWED)
def test_attributes_are_those_of_each_call(gives_on: Callable[[Any, Any], None], way: str) -> None:
    torch.manual_seed(0)
    kind, model = class_that(gives_on), net()
    original = copy.deepcopy(model)
    if way == "convert":
        ours: Any = autocastfx.convert(model, (_image(kind, CALLS[0]),), dtype=LOW)
    else:
        autocastfx.enable(model, dtype=LOW)
        ours = model
    for attributes in CALLS:
        x, given = _image(kind, attributes), _image(kind, attributes)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UncapturedGraphWarning)
            found = ours(x)
        exact = original(given)
        assert (_told(found), _told(x)) == (_told(exact), _told(given))
        apart = (found.as_subclass(Tensor) - exact.as_subclass(Tensor)).detach().abs().max()
        assert 0 < apart < 4 * torch.finfo(LOW).eps


def _image(kind: Any, attributes: dict[str, Any]) -> Any:
    image = torch.linspace(-1, 1, 64).view(4, 16).as_subclass(kind)
    image.__dict__.update(attributes)
    return image


def _replaced(found: Any, given: Any) -> None:
    found.__dict__ = dict(given.__dict__)


def test_what_is_not_followed_is_refused_by_the_name_of_the_class() -> None:
    kind = class_that(_replaced)
    with pytest.raises(CaptureError, match=r"\nImage has a __torch_function__ that one graph cannot hold\. Give"):
        autocastfx.convert(net(), (_image(kind, {"label": "a"}),), dtype=LOW)
