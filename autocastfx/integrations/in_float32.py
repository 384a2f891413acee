"""Give float32 for 16 bits in what a module returns, whatever it returns it in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["in_float32"]


def in_float32(returned: Any, low: torch.dtype, given: Any) -> Any:
    """Return ``returned`` with float32 tensors in the places of those of ``low``.

    An object of a class that pytrees do not know is copied, and its copy holds them; objects inside it stay. So do
    objects in ``given``, the arguments of the call, such as a cache.
    """

    @cache  # few models need it
    def arguments() -> set[int]:
        return {id(leaf) for leaf in pytree.tree_leaves(given)}

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.float() if leaf.dtype == low else leaf
        if isinstance(leaf, (nn.Module, type)) or id(leaf) in arguments():
            return leaf
        items = _widened_values(dict(cast("dict[Any, Any]", leaf)), low) if isinstance(leaf, dict) else {}
        attributes = _widened_values(_attributes(leaf), low)
        if not items and not attributes:
            return leaf
        twin = copy.copy(leaf)
        for key, value in items.items():
            dict.__setitem__(twin, key, value)
        for name, value in attributes.items():
            object.__setattr__(twin, name, value)  # a dataclass may be frozen
        return twin

    return pytree.tree_map(widened, returned)


def _attributes(held: Any) -> dict[str, Any]:
    table: Any = getattr(held, "__dict__", None)
    if isinstance(table, dict):
        return dict(cast("dict[str, Any]", table))
    return {one.name: getattr(held, one.name) for one in fields(held)} if is_dataclass(held) else {}  # with slots


def _widened_values(values: Mapping[Any, Any], low: torch.dtype) -> dict[Any, Any]:
    """Return the values that hold tensors of ``low``, by key, with float32 in their places."""
    return {
        key: pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == low else t, value)
        for key, value in values.items()
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == low for leaf in pytree.tree_leaves(value))
    }
