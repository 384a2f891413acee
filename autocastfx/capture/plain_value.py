"""Plain values: None, truth values, numbers, text, dtypes and devices, and tuples of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

__all__ = ["is_plain", "is_same", "plain_parts"]

_LEAVES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device})
# Objects whose attributes are not settings of a model: guards do not look into them.
_OTHERS = (nn.Module, torch.Tensor, torch.Generator, type)


def is_plain(value: Any) -> bool:
    """True for a plain value, and for a tuple of plain values."""
    return type(value) in _LEAVES or (type(value) is tuple and all(map(is_plain, value)))


def is_same(a: Any, b: Any) -> bool:
    """True if two plain values are interchangeable: 0.0 is not -0.0, True is not 1, and NaN equals NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return type(a) in _LEAVES and a == b


def plain_parts(held: Any) -> dict[str, Any]:
    """Return an object's plain attributes by name, such as a configuration's fields.

    A list, set or dictionary counts as the tuple of its items, if all are plain; if ``held`` itself is one, its name
    is ``""``.
    """
    whole = _as_tuple(held)
    if whole is not None:
        return {"": whole}
    if isinstance(held, _OTHERS) or callable(held) or not hasattr(held, "__dict__"):
        return {}
    parts = ((n, v if is_plain(v) else _as_tuple(v)) for n, v in cast("dict[str, Any]", vars(held)).items())
    return {name: value for name, value in parts if value is not None or vars(held)[name] is None}


def _as_tuple(held: Any) -> tuple[Any, ...] | None:
    items: Iterable[Any] = ()
    if type(held) is dict:
        items = cast("dict[Any, Any]", held).items()
    elif type(held) in (set, frozenset):
        items = sorted(held, key=repr)
    elif type(held) is list:
        items = cast("list[Any]", held)
    else:
        return None
    found = tuple(items)
    return found if is_plain(found) else None
