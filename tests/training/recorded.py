"""A stand-in for CUDA graphs on any device: what a function does to tensors is recorded, and done again without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class Recorded(TorchDispatchMode):
    """Records every operator that runs while it is open, with the tensors that it took and gave.

    As in a CUDA graph, memory stays where it is, Python does not run again, and the host may read nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError("the host reads a number from the device")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Do all of it again: on the contents that the tensors have now, into the tensors that were made then."""
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                for was, now in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                    if now.untyped_storage().data_ptr() != was.untyped_storage().data_ptr():
                        was.copy_(now)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def record(step: Callable[[], object]) -> Recorded:
    """Run ``step`` once and record it. (A CUDA graph records it without running it.)"""
    recorded = Recorded()
    with recorded:
        step()
    return recorded
