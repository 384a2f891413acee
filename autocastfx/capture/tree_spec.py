"""Read the nesting of arguments from a pytree's spec alone, without constructing the user's objects."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["leaf_paths", "written"]

_BRACKETS = {dict: "{}", list: "[]", tuple: "()"}


def leaf_paths(spec: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    """Return the keys, field names and positions that lead to each leaf, in order."""
    if spec.is_leaf():
        return [()]
    steps = _steps(spec)
    return [(step, *path) for step, child in zip(steps, spec.children(), strict=True) for path in leaf_paths(child)]


def written(spec: pytree.TreeSpec, words: Iterable[str]) -> str:
    """Write the tree in Python's notation, with one of ``words`` for each leaf, in order: ``{a: [1, None]}``."""
    return _written(spec, iter(words))


def _written(spec: pytree.TreeSpec, words: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(words)
    members = [_written(child, words) for child in spec.children()]
    kind: Any = spec.context if spec.type is namedtuple else spec.type
    steps = _steps(spec)
    if kind in (list, tuple):
        inside = ", ".join(members) + ("," if kind is tuple and len(members) == 1 else "")
    elif all(isinstance(step, int) for step in steps) and kind is not dict:
        inside = ", ".join(members)
    else:
        sign = ": " if kind is dict else "="
        inside = ", ".join(f"{step}{sign}{member}" for step, member in zip(steps, members, strict=True))
    opening, closing = _BRACKETS.get(kind, "()")
    return f"{'' if kind in _BRACKETS else kind.__name__}{opening}{inside}{closing}"


def _steps(spec: pytree.TreeSpec) -> list[Any]:
    """Return a key, field name or position for each child. Keys are the context, or one of its members."""
    context: Any = spec.context
    count = spec.num_children
    if spec.type is namedtuple:
        return list(context._fields)
    parts: list[Any] = [context, *context] if isinstance(context, (list, tuple)) else []
    fitting = (part for part in parts if isinstance(part, (list, tuple)) and len(part) == count)
    named = (part for part in fitting if spec.type is dict or all(isinstance(step, str) for step in part))
    return list(next(named, range(count)))
