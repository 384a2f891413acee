"""Hold the kernels that quantise against the operator's own parts, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from autocastfx.policy.float8 import E4M3, E5M2, Layout
from autocastfx.runtime.operators import float8

_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": E4M3, "fp8e5": E5M2}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
# Blocks that the interpreter needs few programs for: some below and beside each other, and rows of several.
_SMALL = {"_WIDEST": 64, "_PART": 32, "_ROWS": 16, "_COLUMNS": 16, "_STEPS": 2, "_SCALES": 32}
_FLAT = {"_ROWS": 1, "_COLUMNS": 16_384, "_STEPS": 1, "_SCALES": 65_536}


@contextmanager
def torch_casts() -> Iterator[None]:
    """Let Triton's interpreter cast as CUDA does: its own is wrong for subnormal bfloat16, and for most of float8."""
    from triton.runtime import interpreter

    def cast(numbers: Any, source: Any, target: Any, rounding: object) -> Any:
        made = torch.from_numpy(np.ascontiguousarray(numbers)).view(_TORCH[source.name]).to(_TORCH[target.name])
        return made.view(_BITS[made.itemsize]).numpy()

    with mock.patch.object(interpreter, "_convert_float", cast):
        yield


def _matrices(dtype: torch.dtype, sizes: tuple[tuple[int, int], ...]) -> Iterator[Tensor]:
    for size in sizes:
        # On the CPU, for numbers of a matrix and of its strided copies that are the same.
        random = torch.Generator("cpu").manual_seed(sum(size))
        spread = [2 ** torch.randn(*of, generator=random, device="cpu").mul(4) for of in ((size[0], 1), (size[1],))]
        x = (torch.randn(size, generator=random, device="cpu") * spread[0] * spread[1]).to(dtype)
        yield x
        x = x.clone()
        x[-1], x[:, -1] = 0.0, -0.0
        x[0] *= 1e-38  # subnormal
        x[size[0] // 2, size[1] // 3], x[size[0] // 3, size[1] // 2] = torch.inf, torch.nan
        yield x.t().contiguous().t()
        yield torch.stack([x, x], 2).reshape(len(x), -1)[:, ::2]


def check_quantize(kernels: Any, dtype: torch.dtype) -> None:
    """Over sizes at the edge of blocks, strides, dtypes, and what is not finite."""
    on_gpu = torch.get_default_device().type == "cuda"
    sizes = ((1, 1), (600, 129), (3, 40_000)) if on_gpu else ((1, 1), (40, 20), (3, 70))
    with ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(torch_casts())
            stack.enter_context(mock.patch.multiple(kernels, **_SMALL))
        kinds = itertools.cycle(itertools.product((E4M3, E5M2), (True, False)))
        for x, (made, power_of_two) in zip(_matrices(dtype, sizes), kinds, strict=False):
            _check(kernels, x.to(torch.get_default_device()), made, power_of_two)
        if not on_gpu:
            stack.enter_context(mock.patch.multiple(kernels, **_FLAT))
        for x, made in itertools.product([_at_the_edge(dtype)], (E4M3, E5M2)):
            for power_of_two in (True, False):
                wanted = float8._parts(x, Layout.COLUMNS, made, power_of_two)
                _assert_same(kernels.quantize_columns(x, made, power_of_two), wanted)


def _at_the_edge(dtype: torch.dtype) -> Tensor:
    """Each 16-bit number in a column of its own; or float32 numbers whose scale is a power of two, or almost.

    How CUDA rounds the logarithm of such a float32 scale is its own, so that there these numbers are fewer.
    """
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[None]
    most, powers = torch.finfo(E4M3).max, 2.0 ** torch.arange(-110, 40)
    steps = torch.zeros(1) if powers.is_cuda else torch.arange(-50, 51)
    return (most * powers[:, None] * (1 + steps * 2.0**-23)).reshape(1, -1)


def _check(kernels: Any, x: Tensor, dtype: torch.dtype, power_of_two: bool) -> None:
    rows, columns = (float8._parts(x, layout, dtype, power_of_two) for layout in (Layout.ROWS, Layout.COLUMNS))
    both = kernels.quantize_both(x, dtype, power_of_two)
    _assert_same(both[0], rows)
    _assert_same(both[1], columns)
    _assert_same(kernels.quantize_rows(x, dtype, power_of_two), rows)
    _assert_same(kernels.quantize_columns(x, dtype, power_of_two), columns)


def _assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """To the bit, but a NaN is a NaN: its sign differs from device to device."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, True)
        a, b = one.float(), other.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7).view(torch.int32), b.nan_to_num(7).view(torch.int32))
