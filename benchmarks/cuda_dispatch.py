"""Let abstract tensors on the meta device take the operators, and the casts of torch.autocast, of a CUDA device.

On the meta device torch takes some operators apart that are one kernel on CUDA, and torch.autocast ignores tensors
there. For as long as a region lasts, other kernels are registered for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.passes.torch_autocast.dispatch import asked
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category
from autocastfx.runtime import working_copies
from benchmarks.memory import cuda_dropout

__all__ = ["cuda_autocast", "cuda_operators", "without_autocast"]

aten: Any = torch.ops.aten
_KEY = DispatchKey.AutocastCUDA


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Run attention, softmax, dropout and the casts of gradients on the meta device as on a CUDA device."""
    together = mock.patch.object(working_copies, "casts_together", return_value=True)
    with together, cuda_dropout(), torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        for name, compute in (("softmax", aten._softmax), ("log_softmax", aten._log_softmax)):
            library.impl(f"{name}.int", _softmax(compute), "AutogradMeta")
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run scaled_dot_product_attention with the kernel that torch chooses on an H100 or H200.

    As in torch, a mask of truth values becomes a floating one in each call, and memory-efficient attention expands a
    mask to all heads and queries: its gradient has all these numbers, and is then added up.

    Raises:
        NotImplementedError: heads are in groups.
    """
    if enable_gqa:
        raise NotImplementedError("attention of heads in groups is not estimated")
    given, is_low = (query, key, value), query.dtype in LOW_DTYPES
    saves = any(t.requires_grad for t in given)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, query.new_full((), float("-inf")))
    options: tuple[Any, ...]
    if is_low and _suits_cudnn(query, key, value, attn_mask, dropout_p):
        options = attn_mask, saves, dropout_p, is_causal
        found: Tensor = aten._scaled_dot_product_cudnn_attention(*given, *options, scale=scale)[0]
        return found
    if is_low and attn_mask is None:
        found = aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, scale=scale)[0]
        return found
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    options = attn_mask, saves, dropout_p, is_causal
    found = aten._scaled_dot_product_efficient_attention(*given, *options, scale=scale)[0]
    return found


def _suits_cudnn(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> bool:
    """Tell where torch takes cuDNN's attention, which it tries first on these devices, for 16-bit values.

    It is not for masks that learn or have three dimensions, nor for probabilities of dropout that are no sixteenths
    (torch 2.11 takes it for these too), nor for one key, or one query with dropout.
    """
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.ndim not in (2, 4)):
        return False
    if key.shape[2] == 1 or (dropout_p and query.shape[2] == 1):
        return False
    has_heads = all(t.shape[3] <= 128 and t.shape[3] % 8 == 0 for t in (query, value))
    return has_heads and (16 * dropout_p).is_integer()


def _softmax(compute: Any) -> Callable[..., Tensor]:
    """Make a softmax that widens a float16 input inside its kernel if a float32 result is asked for."""

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        widens = x.dtype == torch.float16 and dtype == torch.float32
        found: Tensor = compute(x if widens or dtype is None else x.to(dtype), dim, widens)
        return found

    return softmax


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Cast abstract tensors as ``torch.autocast("cuda", dtype)`` casts a CUDA device's.

    The operators are those that torch registers for it, the rule of each is the one in the preset
    ``torch_autocast_cuda``. The 16-bit cast of a parameter is kept for the region, other casts are not, as in torch.
    """
    rules = _Rules(dtype)
    was_enabled = torch.is_autocast_enabled("cuda")
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # they are replaced on purpose
            for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
                if "name" not in name.lower():  # of dimensions, as in torch 2.11
                    library.impl(name, rules.kernel(name), "AutocastCUDA", allow_override=True)
        torch.set_autocast_enabled("cuda", True)
        try:
            with torch._C._IncludeDispatchKeyGuard(_KEY):
                yield
        finally:
            torch.set_autocast_enabled("cuda", was_enabled)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leave inputs as they are inside ``cuda_autocast``."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
        yield


class _Rules:
    """Makes a kernel for each operator that torch.autocast knows; ``low`` is its 16-bit dtype."""

    def __init__(self, low: torch.dtype) -> None:
        self.low, self.op_list = low, load_op_list("torch_autocast_cuda")
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # a parameter's address → it, so that it lives, and its cast

    def kernel(self, name: str) -> Callable[..., Any]:
        """Make the kernel of an operator named as in ``aten::mm.dtype``."""
        target = _operator(name)
        op, listed = target._schema.name.removeprefix("aten::"), self.op_list.rules
        rule = listed.get(f"{op}.{target._overloadname}") or listed[op]

        def run(*args: Any, **kwargs: Any) -> Any:
            called, args, kwargs = self._prepared(target, op, rule.category, args, kwargs)
            with without_autocast():
                return called(*args, **kwargs)

        return run

    def _prepared(self, target: Any, op: str, category: Category, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the call to make, with the operator's inputs cast."""
        floats = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_cast(leaf)]
        if category is Category.ALLOW:
            to = self.low
        elif category is Category.PROMOTE:
            to = torch.float32 if any(leaf.dtype == torch.float32 for leaf in floats) else self.low
        elif category is not Category.DENY:
            raise RuntimeError(f"torch.autocast refuses {op}")
        elif op in self.op_list.set_dtype:
            names = [argument.name for argument in target._schema.arguments]
            has_dtype = {**dict(zip(names, args, strict=False)), **kwargs}.get("dtype") is not None
            return (target, args, kwargs) if has_dtype or not _is_cast(args[0]) else asked(target, args, kwargs)
        else:
            to = torch.float32
        with without_autocast():
            args, kwargs = pytree.tree_map(lambda leaf: self._cast(leaf, to), (args, kwargs))
        return target, args, kwargs

    def _cast(self, leaf: Any, to: torch.dtype) -> Any:
        if not _is_cast(leaf) or leaf.dtype == to:
            return leaf
        if not (to == self.low and leaf.is_leaf and leaf.requires_grad and not leaf._is_view()):
            return leaf.to(to)
        if id(leaf) not in self._kept:
            self._kept[id(leaf)] = leaf, leaf.to(to)
        return self._kept[id(leaf)][1]


def _operator(name: str) -> Any:
    """The operator named as in ``aten::mm.dtype``."""
    op, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, op), overload or "default")


def _is_cast(leaf: Any) -> bool:
    """True for a floating tensor that is not float64."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
