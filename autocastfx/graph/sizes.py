"""The value of a size for the example inputs."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["example", "example_size", "largest_size", "unknown_size"]


def example(number: Any) -> Any:
    """``number``, or what a symbolic one is for the example inputs; None for one that depends on data."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    node = number.node
    if node.hint is None:  # torch 2.11 keeps none for what it finds equal to the size of an input only later
        found = node.expr.xreplace(node.shape_env.backed_var_to_val)
        return None if found.free_symbols else node.pytype(found)
    return node.hint


def example_size(number: Any) -> Any:
    """The same, but 1 for one that depends on data."""
    found = example(number)
    return 1 if found is None and isinstance(number, torch.SymInt) else found


def largest_size(number: Any) -> float:
    """Magnitude of ``number``, or the most that a symbolic one may be; infinite where nothing bounds it."""
    if not isinstance(number, torch.SymInt):
        return abs(float(number))
    bound = number.node.shape_env.bound_sympy(number.node.expr).upper
    return float(bound) if bound.is_finite else math.inf


def unknown_size(number: Any) -> None:
    """None: a graph made without inputs has stand-ins of one element each, whose sizes say nothing."""
