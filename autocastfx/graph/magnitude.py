"""The magnitudes of values: measured, counted beside a dtype's limits and by powers of two, and where none count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autocastfx.errors import ArgumentError
from autocastfx.graph.alias import is_view_or_copy
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import Use, argument, constants, has_float32, tensors, uses


def _read(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """Read tensors of one shape, with one transfer from each device."""
    values: dict[int, Any] = {}
    for device in dict.fromkeys(one.device for one in numbers):
        here = [i for i, one in enumerate(numbers) if one.device == device]
        values.update(zip(here, torch.stack([numbers[i] for i in here]).cpu().tolist(), strict=True))
    return [values[i] for i in range(len(numbers))]


# Measure the largest and the typical magnitude of a float32 value's elements.


@dataclass(frozen=True)
class Magnitude:
    """The magnitudes of a value's finite elements.

    Attributes:
        largest: the largest magnitude.
        rms: the root mean square of the elements that are not 0; over several tensors or batches, the largest such
            figure. 0 if all elements are 0, or smaller than about 1e-22.
    """

    largest: float
    rms: float


class Measured(NamedTuple):
    """A :class:`Magnitude` and the number of non-finite elements, as 0-d tensors on one device."""

    largest: torch.Tensor
    rms: torch.Tensor
    non_finite: torch.Tensor

    def magnitude(self) -> Magnitude:
        """Read the numbers. Waits for the device."""
        return Magnitude(float(self.largest), float(self.rms))


def magnitude(value: Any) -> Measured | None:
    """Measure all float32 tensors in ``value`` without waiting for an accelerator.

    Returns None if there is no dense float32 tensor with elements in this process; fake and distributed tensors do not
    count.
    """
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    reached = [_of(leaf.detach()) for leaf in leaves if leaf.dtype == torch.float32 and leaf.numel() and is_here(leaf)]
    if not reached:
        return None
    first, *others = reached
    for more in others:
        largest, rms = torch.maximum(first.largest, more.largest), torch.maximum(first.rms, more.rms)
        first = Measured(largest, rms, first.non_finite + more.non_finite)
    return first


def is_here(tensor: torch.Tensor) -> bool:
    """True for a dense tensor with values in this process."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


def _of(tensor: torch.Tensor) -> Measured:
    low, high = tensor.aminmax()
    if tensor.device.type == "cpu" and math.isfinite(float(low)) and math.isfinite(float(high)):
        # nearly always: then all elements are finite
        return Measured(torch.maximum(-low, high), _rms(tensor), low.new_zeros((), dtype=torch.int64))
    is_finite = tensor.isfinite()
    finite = tensor.where(is_finite, 0.0)
    low, high = finite.aminmax()
    return Measured(torch.maximum(-low, high), _rms(finite), (~is_finite).sum())


def _rms(finite: torch.Tensor) -> torch.Tensor:
    # Squares that underflow count as 0; a norm that overflows is limited to float32's largest number.
    norm = torch.linalg.vector_norm(finite).clamp(max=torch.finfo(finite.dtype).max)
    return norm / torch.count_nonzero(finite).clamp(min=1).sqrt()


def read_magnitudes(measured: Sequence[Measured]) -> list[tuple[Magnitude, int]]:
    """Read magnitudes and numbers of non-finite elements, with three transfers from each device."""
    largest, rms, non_finite = (_read([one[i] for one in measured]) for i in range(3))
    return list(zip(map(Magnitude, largest, rms), non_finite, strict=True))


# Count, on their device, which values of a node overflowed or underflowed, and find the largest magnitude.

# A magnitude's bits, read as an integer, grow with it: Inf follows the finite numbers, and NaN follows Inf.
_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class ValueCounts:
    """Counts of the elements of values.

    Attributes:
        elements: all of them.
        overflow: those that are Inf or NaN.
        underflow: see :func:`count_values`.
        largest: the largest finite magnitude; 0 if there is none.
    """

    elements: int = 0
    overflow: int = 0
    underflow: int = 0
    largest: float = 0.0

    def __add__(self, other: ValueCounts) -> ValueCounts:
        return ValueCounts(
            self.elements + other.elements,
            self.overflow + other.overflow,
            self.underflow + other.underflow,
            max(self.largest, other.largest),
        )


class DeviceCounts(NamedTuple):
    """Counts that may still be computed: finite, not small and nonzero elements, and the bits of the largest."""

    elements: int
    numbers: torch.Tensor


@torch.no_grad()
def count_values(value: torch.Tensor, source: torch.Tensor | None = None) -> DeviceCounts | None:
    """Count the elements of ``value``; nothing waits for the device.

    With a ``source`` of the same shape, of which ``value`` is a cast, underflow counts the elements that are subnormal
    or zero in the dtype of ``value`` and not zero in ``source``. Without one, it counts the subnormal elements alone:
    a zero may be meant.

    Args:
        value: float16, bfloat16 or float32, of any shape.
        source: floating point.

    Returns:
        The counts; None for other dtypes, for layouts that are not strided, and for no elements.
    """
    integer = _INTEGERS.get(value.dtype)
    if integer is None or value.layout is not torch.strided or not value.numel():
        return None
    infinite, normal = _edges(value.dtype)
    bits = value.detach().view(integer) & torch.iinfo(integer).max
    nonzero = torch.count_nonzero(bits if source is None else source.detach())
    not_small = torch.count_nonzero(bits >= normal)
    top = bits.amax()
    if bits.device.type == "cpu" and int(top) < infinite:  # nothing waits to be asked there, and most values are finite
        finite = torch.tensor(value.numel(), device="cpu")
    else:
        are_finite = bits < infinite
        finite, top = torch.count_nonzero(are_finite), torch.where(are_finite, bits, 0).amax()
    largest = top.view(value.dtype).float().view(torch.int32).long()
    return DeviceCounts(value.numel(), torch.stack((finite, not_small, nonzero, largest)))


@lru_cache
def _edges(dtype: torch.dtype) -> tuple[int, int]:
    """The bits of Inf and of the smallest normal number."""
    info = torch.finfo(dtype)
    infinite, normal = torch.tensor([torch.inf, info.tiny], dtype=dtype, device="cpu").view(_INTEGERS[dtype]).tolist()
    return infinite, normal


def read_counts(counts: Sequence[DeviceCounts]) -> list[ValueCounts]:
    """Read the counts, with one transfer from each device."""
    rows = _read([one.numbers for one in counts])
    largest = torch.tensor([row[3] for row in rows], dtype=torch.int32, device="cpu").view(torch.float32).tolist()
    return [
        ValueCounts(one.elements, one.elements - finite, max(nonzero - normal, 0), top)
        for one, (finite, normal, nonzero, _), top in zip(counts, rows, largest, strict=True)
    ]


# Count numbers by magnitude, in powers of two.

_BIAS, _BINS = 127, 256  # of float32's exponent
_ZEROS = _BINS  # the bin of zeros, after those of the exponents
# In float16 a magnitude below 2**-25 rounds to zero, below 2**-14 it is denormal, and from 2**16 on infinite.
_SMALLEST, _NORMAL, _END = -25, -14, 16


class Shares(NamedTuple):
    """The shares of nonzero finite numbers that become zero, denormal, normal or infinite in float16.

    They add up to 1; all are 0 if there are no numbers.
    """

    zero: float
    denormal: float
    normal: float
    infinite: float


@dataclass(frozen=True)
class Margin:
    """How far numbers are from float16's limits, in powers of two; below 0 they are beyond a limit.

    Attributes:
        loss_scale: by what the numbers are multiplied.
        largest, smallest: the exponents of the largest and the smallest number, without the scale; -127 stands for any
            below -126.
        to_infinite: by how many powers of two all may grow before the largest becomes infinite.
        to_denormal, to_zero: by how many they may shrink before the smallest becomes denormal, and zero.
    """

    loss_scale: float
    largest: int
    smallest: int
    to_infinite: int
    to_denormal: int
    to_zero: int

    def __str__(self) -> str:
        return (
            f"times 2**{shift_of(self.loss_scale)}: the largest, from 2**{self.largest}, are "
            f"{_away(self.to_infinite, 'infinity')}; the smallest, from 2**{self.smallest}, are "
            f"{_away(self.to_denormal, 'denormals')} and {_away(self.to_zero, 'zero')}"
        )


def _away(powers: int, limit: str) -> str:
    count = f"{abs(powers)} power{'s' if abs(powers) != 1 else ''} of two"
    return f"{count} away from {limit}" if powers >= 0 else f"{count} into {limit}"


@dataclass(frozen=True)
class Exponents:
    """Counts of numbers by magnitude.

    Attributes:
        counts: by exponent ``e``, the number of magnitudes from ``2**e`` up to ``2**(e + 1)``. Those below ``2**-126``
            are counted at -127.
        zeros: the number of zeros.
        non_finite: the number of Inf and NaN.
        largest: the largest finite magnitude.
    """

    counts: Mapping[int, int]
    zeros: int
    non_finite: int
    largest: float

    @property
    def total(self) -> int:
        """The number of finite numbers other than zero."""
        return sum(self.counts.values())

    def shares(self, loss_scale: float = 1.0) -> Shares:
        """Return the shares in float16 of the numbers times ``loss_scale``.

        Raises:
            ValueError: ``loss_scale`` is not a power of two; numbers are counted by powers of two.
        """
        shift, total = shift_of(loss_scale), max(self.total, 1)

        def share(low: float, high: float) -> float:
            return sum(n for e, n in self.counts.items() if low <= e + shift < high) / total

        return Shares(
            zero=share(-math.inf, _SMALLEST),
            denormal=share(_SMALLEST, _NORMAL),
            normal=share(_NORMAL, _END),
            infinite=share(_END, math.inf),
        )

    def margin(self, loss_scale: float = 1.0) -> Margin | None:
        """Return how far the numbers times ``loss_scale`` are from float16's limits; None if all are zero.

        Raises:
            ValueError: ``loss_scale`` is not a power of two.
        """
        shift = shift_of(loss_scale)
        if not self.counts:
            return None
        largest, smallest = max(self.counts), min(self.counts)
        low = smallest + shift
        return Margin(loss_scale, largest, smallest, _END - 1 - largest - shift, low - _NORMAL, low - _SMALLEST)

    def __add__(self, other: Exponents) -> Exponents:
        exponents = sorted({*self.counts, *other.counts})
        return Exponents(
            {e: self.counts.get(e, 0) + other.counts.get(e, 0) for e in exponents},
            self.zeros + other.zeros,
            self.non_finite + other.non_finite,
            max(self.largest, other.largest),
        )


NOTHING = Exponents({}, 0, 0, 0.0)


def shift_of(loss_scale: float) -> int:
    """Return the exponent of ``loss_scale``.

    Raises:
        ValueError: ``loss_scale`` is not a power of two.
    """
    mantissa, exponent = math.frexp(loss_scale) if math.isfinite(loss_scale) else (0.0, 0)
    if mantissa != 0.5:
        raise ArgumentError(
            f"loss_scale is a power of two here, such as 2.0**16, not {loss_scale!r}: gradients are "
            "counted by powers of two."
        )
    return exponent - 1


class Tally:
    """Counts numbers on their device, in constant memory. Nothing waits for the device until :func:`read_tallies`."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=device)
        self.largest = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, numbers: torch.Tensor, factor: torch.Tensor | None = None) -> None:
        """Count ``numbers`` (floating, dense) times ``factor`` (float32, no dimensions), in float32."""
        if not numbers.numel():
            return
        wide = numbers.detach().float().abs()
        if factor is not None:
            wide = wide * factor
        exponents = wide.contiguous().view(torch.int32) >> 23
        zeros = (wide == 0).sum()
        self.counts[:_BINS] += _counted(exponents)
        self.counts[0] -= zeros
        self.counts[_ZEROS] += zeros
        self.largest.copy_(torch.maximum(self.largest, wide.where(wide.isfinite(), 0.0).amax()))


def _counted(exponents: torch.Tensor) -> torch.Tensor:
    if exponents.is_cuda:  # there bincount waits for the device
        return torch.histc(exponents, bins=_BINS, min=0, max=_BINS).to(torch.int64)
    return torch.bincount(exponents.flatten(), minlength=_BINS)


def read_tallies(tallies: Sequence[Tally]) -> list[Exponents]:
    """Read all counts, with two transfers from each device."""
    rows, largest = _read([tally.counts for tally in tallies]), _read([tally.largest for tally in tallies])
    return [
        Exponents({e - _BIAS: n for e, n in enumerate(row[: _BINS - 1]) if n}, row[_ZEROS], row[_BINS - 1], reached)
        for row, reached in zip(rows, largest, strict=True)
    ]


# Values whose magnitude does not count: attention scores and the masks that are added to them, which a softmax reads.

# Arguments that may be a mask added to scores. A saturated mask needs headroom there, or score + mask is -inf.
_MASKED = {
    "add": ("self", "other"),
    "sub": ("self", "other"),
    "addmm": ("self",),
    "addbmm": ("self",),
    "baddbmm": ("self",),
    "scaled_dot_product_attention": ("attn_mask",),
}
_SIZES = ("sym_size", "sym_stride", "sym_numel")
# Arguments that are scores, of which what is far below the others counts nothing, however far. (Not those of a
# log_softmax, which tells how far.)
_SCORES = {"softmax": ("self",), "_softmax": ("self",), "_safe_softmax": ("self",)}
# Arguments whose number is written in the place of some elements.
_FILLED = {"where": ("self", "other"), "masked_fill": ("value",)}


def read_as_scores(node: fx.Node, written: Set[fx.Node]) -> frozenset[fx.Node]:
    """``node`` and the views, copies and sums of it; none of them if any is read otherwise than as scores or a mask,
    or by nothing.

    Args:
        node: a float32 value.
        written: values whose storage is written into, which are not followed.
    """
    seen, queue = {node}, [node]
    while queue:
        read = queue.pop()
        if read in written or not read.users:
            return frozenset()
        for reader in read.users:
            if op_name(reader) in _SIZES:
                continue
            arguments = [u.argument for u in uses(reader) if u.node is read]
            if op_name(reader) == "scaled_dot_product_attention" and arguments == ["attn_mask"]:
                continue
            if len(arguments) == 1 and arguments[0] in _SCORES.get(op_name(reader), ()):
                continue
            if len(arguments) != 1 or not _passes_on(reader, arguments[0]):
                return frozenset()
            if reader not in seen:
                seen.add(reader)
                queue.append(reader)
    return frozenset(seen)


def takes_mask(node: fx.Node, use: Use) -> bool:
    """True if ``node`` may add the value of this use to scores, as a mask."""
    return use.argument in _MASKED.get(base_name(op_name(node)), ())


def filled(node: fx.Node) -> tuple[str, float] | None:
    """The argument and the number that ``node`` fills in beside a float32 value, if it is one."""
    names = _FILLED.get(op_name(node), ())
    given = [(name, number) for name, number in constants(node) if name in names]
    beside = has_float32(node) and any(has_float32(u.node) for u in uses(node))
    return given[0] if beside and len(given) == 1 else None


def _passes_on(node: fx.Node, name: str) -> bool:
    """True if a mask, or scores, read as argument ``name`` make the result of ``node`` a mask or scores."""
    op, results = op_name(node), tensors(node)
    if len(results) != 1 or not results[0].is_floating_point():
        return False
    if op in _MASKED:
        factor = argument(node, "alpha" if op in ("add", "sub") else "beta")  # by which a mask is multiplied
        return name in _MASKED[op] and factor in (None, 1)
    return (name == "self" and is_view_or_copy(node)) or filled(node) is not None
