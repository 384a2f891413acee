"""Comparisons that give a Python bool: torch.export takes them apart, not whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Truth"]


class Truth(TorchFunctionMode):
    """Writes ``torch.equal`` and ``torch.allclose`` as the comparison of each element, their conjunction, and a read.

    torch.export refuses the functions themselves, whose result depends on values, but captures a number that is read
    from a tensor as long as nothing branches on it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        apart = None if torch.compiler.is_dynamo_compiling() else _APART.get(func)
        return (apart or func)(*args, **kwargs)


def _equal(input: Tensor, other: Tensor) -> Any:
    """As torch defines it: of one shape, and each pair of elements is equal, after promotion to one dtype."""
    if input.shape != other.shape:
        return False
    return input.eq(other).all().item()


def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """As torch defines it, which broadcasts."""
    return input.isclose(other, rtol, atol, equal_nan).all().item()


_APART: dict[Any, Callable[..., Any]] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
}
