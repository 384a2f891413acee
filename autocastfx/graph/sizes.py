"""Turn symbolic sizes into numbers: their values for the example inputs, or their bounds."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["example", "example_size", "largest_size", "settled_size", "unknown_size"]


def example(number: Any) -> Any:
    """Return the value of ``number`` for the example inputs if it is symbolic; None if it depends on data."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    node = number.node
    if node.hint is None:  # torch 2.11 has no hint for a symbol that it later found equal to an input's size
        found = node.expr.xreplace(node.shape_env.backed_var_to_val)
        return None if found.free_symbols else node.pytype(found)
    return node.hint


def example_size(number: Any) -> Any:
    """Do as ``example``, but return 1 for a size that depends on data."""
    found = example(number)
    return 1 if found is None and isinstance(number, torch.SymInt) else found


def largest_size(number: Any) -> float:
    """Return the magnitude of ``number``, or the upper bound of a symbolic one; infinite if it is unbounded."""
    if not isinstance(number, torch.SymInt):
        return abs(float(number))
    bound = number.node.shape_env.bound_sympy(number.node.expr).upper
    return float(bound) if bound.is_finite else math.inf


def unknown_size(number: Any) -> None:
    """Return None: a draft's values are stand-ins of one element, whose sizes mean nothing."""


def settled_size(number: Any) -> Any:
    """Return ``number`` itself: what is decided by a symbolic size becomes a condition of the graph's guard."""
    return number
