"""Try the backward of custom autograd functions under torch.autocast, before a training step runs it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import random_numbers_kept

__all__ = ["backwards_tried"]


@contextmanager
def backwards_tried(kind: str) -> Generator[None]:
    """Let each custom autograd function fail at its call, if its backward would fail.

    torch.autocast hands a function tensors of two dtypes. Its backward runs after the region, where nothing is cast,
    and then it is too late to run in float32. So it is tried on copies, with gradients of zero. torch's own functions
    are left out: that of activation checkpointing would run a part of the model again.
    """
    original: Any = Function.__dict__["apply"].__func__

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not function.__module__.startswith("torch.") and not _cannot_try():
            copies = pytree.tree_map_only(Tensor, partial(_copy, any_gradient=not torch.is_grad_enabled()), args)
            with random_numbers_kept(), torch.enable_grad():
                found = original(function, *copies, **kwargs)
            _run_backward(found, kind)
        return original(function, *args, **kwargs)

    with patch.object(Function, "apply", classmethod(apply)):
        yield


def _cannot_try() -> bool:
    return torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active()


def _copy(tensor: Tensor, any_gradient: bool) -> Tensor:
    needs = tensor.requires_grad or (any_gradient and (tensor.is_floating_point() or tensor.is_complex()))
    return tensor.detach().clone().requires_grad_(needs)


def _run_backward(found: Any, kind: str) -> None:
    leaves = (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))
    node = next((leaf.grad_fn for leaf in leaves if isinstance(leaf.grad_fn, BackwardCFunction)), None)
    if node is not None:
        outputs = cast("Any", node)._input_metadata
        with torch.autocast(kind, enabled=False), torch.no_grad():
            node.apply(*(torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in outputs))
