"""Rewrite comparisons that return a Python bool for torch.export, which refuses the original functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autocastfx.capture.call_rules import Rule

__all__ = ["COMPARISONS"]


def _equal(input: Tensor, other: Tensor) -> Any:
    """Compare as torch does: the shapes are equal, and so are all elements after promotion to one dtype."""
    if input.shape != other.shape:
        return False
    return input.eq(other).all().item()


def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """Compare as torch does, with broadcasting."""
    return input.isclose(other, rtol, atol, equal_nan).all().item()


# torch.export refuses these functions, because their result depends on values, but captures elementwise comparison,
# ``all`` and ``item`` as long as no code branches on the result.
COMPARISONS: Mapping[Any, Rule] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
}
