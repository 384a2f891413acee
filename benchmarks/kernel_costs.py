"""Estimate the time that each operator of a training step takes on an H200, from abstract tensors.

A kernel is an operator below autograd that computes or copies: not a view, and not an allocation. It takes the longest
of three times: its bytes at full memory bandwidth, its operations at the peak rate of their dtype, and the time that
the smallest kernel takes. It reads each of its inputs once and writes its outputs once. This is an ESTIMATE: real
kernels reach less of the peaks, some operators are two or three kernels, caches spare reads, and a host that is slow to
launch kernels makes a device wait.

The peaks are those of NVIDIA's H200 datasheet (SXM, without sparsity): 4.8 TB/s, 989 TFLOP/s in float16 and bfloat16 on
tensor cores, 494 in TF32, 67 in float32. Convolutions of float32 values use TF32, and matrix products do not, as torch
has it by default. The floor of 2 µs is an assumption: a kernel that does nothing takes about that long on such devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from autocastfx.dtypes import LOW_DTYPES
from benchmarks.cuda_dispatch import without_autocast
from benchmarks.step_counts import Counter, allocates

__all__ = ["BANDWIDTH", "FLOOR", "KernelCosts"]

aten: Any = torch.ops.aten
BANDWIDTH = 4.8e12  # bytes a second
TENSOR_CORES, TF32, FLOAT32 = 989e12, 494e12, 67e12  # operations a second
FLOOR = 2e-6  # seconds

_FOREACH = (aten._foreach_copy_.default, aten._foreach_add_.Scalar)
_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
# Of these the first argument gives its shape alone, or is written over.
_SHAPES = (
    "copy_",
    "_foreach_copy_",
    "fill_",
    "zero_",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
)
# Of the first argument these read as many elements as they return, or as they have indices.
_GATHERS = ("embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward")
# Of these the second argument gives its shape alone.
_SHAPES_OF_SECOND = ("nll_loss_backward", "nll_loss2d_backward")


class KernelCosts(Counter):
    """Counts, while entered, what :class:`Counter` counts, and the kernels, their bytes and their time.

    Attributes:
        kernels: operators that compute or copy.
        bytes: that they move.
        seconds: by operator, the time that they take.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any]) -> None:
        super().__init__(model, inputs)
        self.kernels = self.bytes = 0
        self.seconds = dict[str, float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_autocast():  # what computes an abstract result is no part of the step
            result = super().__torch_dispatch__(func, types, args, kwargs)
        written = _tensors(args[0] if func in _FOREACH else result)
        if func.is_view or allocates(func) or not any(tensor.numel() for tensor in written):
            return result
        moved = _bytes(func, args, kwargs, written)
        seconds = max(moved / BANDWIDTH, _flops(func, args, kwargs, result) / _peak(func, args), FLOOR)
        self.kernels, self.bytes = self.kernels + 1, self.bytes + moved
        self.seconds[_name(func)] = self.seconds.get(_name(func), 0.0) + seconds
        return result


def _name(func: Any) -> str:
    name: str = func.name()
    return name.removeprefix("aten::").partition(".")[0]


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of ``tree``; those that look at the same elements once."""
    found = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return list({(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in found}.values())


def _size(tensor: Tensor) -> int:
    """Return the bytes of the elements; those that are seen several times, because a size is expanded, count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _bytes(func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> int:
    name, kwargs = _name(func), {key: given for key, given in kwargs.items() if key != "out"}  # that is not read
    if name in _SHAPES:
        args = args[1:]
    elif name in _SHAPES_OF_SECOND:
        args = args[:1] + args[2:]
    moved = sum(map(_size, written))
    if name in _GATHERS:
        first, *others = _tensors((args, kwargs))
        gathered = max(t.numel() for t in (written[0], *others[:1])) * first.element_size()
        return moved + min(gathered, _size(first)) + sum(map(_size, others))
    return moved + sum(map(_size, _tensors((args, kwargs))))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Count by torch's formulas, which count causal attention in full; 0 for what is bound by its bytes."""
    count = flop_registry.get(func.overloadpacket)
    return count(*args, **kwargs, out_val=result) if count else 0


def _peak(func: Any, args: Any) -> float:
    if any(tensor.dtype in LOW_DTYPES for tensor in _tensors(args)):
        return TENSOR_CORES
    return TF32 if func.overloadpacket in _CONVOLUTIONS else FLOAT32
