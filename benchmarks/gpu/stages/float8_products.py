"""Time float8 matrix products and the quantisation that they need, beside the bfloat16 product."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autocastfx.policy.float8 import Layout
from autocastfx.runtime.operators.float8 import _parts
from benchmarks.gpu.measure import Work, failure, interleaved, release, settle, timed
from benchmarks.gpu.stage import ROUNDS, Given, Rounds, Row
from benchmarks.judge import distance

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # torchao's: what is smaller becomes 0, and the scale stays finite
BFLOAT16, COPY = "bfloat16", "copy"
SIDES = (BFLOAT16, "tensorwise", "rowwise", "rowwise, e5m2 gradient")
COMPARED = 256  # rows of a product that are compared with float64's
PARTS, FUSED, TRITON = "parts", "parts, compiled", "Triton"  # of the package's operator
Shape = tuple[int, int, int]
Size = tuple[int, int]


def quantised(x: Tensor, dtype: torch.dtype = E4M3, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x`` in float8, and the float32 factor that gives it back.

    The greatest magnitude of the tensor, or along ``dim``, becomes the greatest one of ``dtype``. An infinity or a NaN
    makes all that shares its scale NaN.
    """
    magnitude = x.abs()
    amax = magnitude.amax() if dim is None else magnitude.amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / amax.float().clamp(min=LEAST)
    return (x.float() * scale).to(dtype), scale.reciprocal()


def rowwise(x: Tensor) -> tuple[Tensor, ...]:
    """Quantise ``x`` with a scale for each row."""
    return quantised(x, dim=1)


def both_layouts(x: Tensor) -> tuple[Tensor, ...]:
    """Quantise ``x`` with a scale for each row, and its transpose too, whose rows are contiguous."""
    columns, factor = quantised(x, dim=0)
    return *rowwise(x), columns.t().contiguous(), factor.t()


Quantiser = Callable[[Tensor], Any]
Compiled = Mapping[tuple[Size, str], Quantiser | str]  # by size and name; or why it is not compiled
EAGER: Mapping[str, Quantiser] = {
    **{COPY: torch.clone, "eager tensorwise": quantised},
    **{"eager rowwise": rowwise, "eager both layouts": both_layouts},
}
COMPILED: Mapping[str, Quantiser] = {"compiled rowwise": rowwise, "compiled both layouts": both_layouts}
LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    **{layout.value: (layout,) for layout in (Layout.ROWS, Layout.COLUMNS)},
    "both": (Layout.ROWS, Layout.COLUMNS),
}


def operator(layouts: Sequence[Layout]) -> Quantiser:
    """Return what the package's operator does for these layouts, from its parts, with scales that are powers of two."""
    return lambda x: [made for layout in layouts for made in _parts(x, layout, E4M3, True)]


def kernels(name: str, device: str) -> Quantiser | str:
    """Return what the Triton kernels do for layouts of this name, or why they cannot run."""
    if device != "cuda":
        return f"Triton kernels run on CUDA, not on {device}"
    if not find_spec("triton"):
        return "the package triton is not installed"
    from autocastfx.runtime.kernels import quantize

    if name == "both":
        return lambda x: [made for one in quantize.quantize_both(x, E4M3, True) for made in one]
    call = quantize.quantize_rows if name == Layout.ROWS else quantize.quantize_columns
    return lambda x: call(x, E4M3, True)


def products(
    given: Given,
    shapes: Sequence[Shape],
    rounds: Rounds = ROUNDS,
    compiling: float = 30,
    quantised: Sequence[Size] = (),
) -> Iterator[Row]:
    """Yield the times of products, their distance from float64's, and the times of quantising.

    The calls are replayed from a CUDA graph, so that what counts is the device's time, not Python's.

    Args:
        given: what every stage is given.
        shapes: M, K and N of the product of (M, K) and (K, N).
        rounds: how many, for each shape.
        compiling: seconds; what is not compiled by then has errors for rows.
        quantised: matrices that the package's operator quantises, too, besides the first operands.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    sizes = dict.fromkeys((m, k) for m, k, _ in shapes)
    left = [size for size in sizes if not all(given.has(_quantise(size), side) for side in (*EAGER, *COMPILED))]
    pairs = [(size, name) for size in quantised for name in LAYOUTS]
    pairs = [at for at in pairs if not all(given.has(_operator(*at), side) for side in (PARTS, FUSED, TRITON))]
    wanted = [(size, name, operator(LAYOUTS[name])) for size, name in pairs]
    wanted += [(size, side, function) for size in left for side, function in COMPILED.items()]
    compiled = _compiled(wanted, given.device, compiling)
    release()
    settle()
    given.wait()
    for shape in shapes:
        names = {**dict.fromkeys(SIDES, _product(shape)), "": _linear(shape)}
        if not all(given.has(name, side) for side, name in names.items()):
            yield from _guarded(names, _of_shape(shape, rounds, given.device))
    for size in left:
        names = dict.fromkeys((*EAGER, *COMPILED), _quantise(size))
        sides = {side: EAGER.get(side) or compiled[size, side] for side in names}
        yield from _guarded(names, _of_size(_quantise(size), size, sides, COPY, rounds, given.device))
    for size, name in pairs:
        sides = {PARTS: operator(LAYOUTS[name]), FUSED: compiled[size, name], TRITON: kernels(name, given.device)}
        names = dict.fromkeys(sides, _operator(size, name))
        yield from _guarded(names, _of_size(_operator(size, name), size, sides, PARTS, rounds, given.device))


def _product(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _linear(shape: Shape) -> str:
    return f"linear {_product(shape)}"


def _quantise(size: Size) -> str:
    return f"quantise {size[0]} x {size[1]}"


def _operator(size: Size, name: str) -> str:
    return f"quantize {name} {size[0]} x {size[1]}"


def _guarded(names: Mapping[str, str], rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows, or an error for each side that has none, so that the other shapes are measured."""
    left = dict(names)
    try:
        release()
        for row in rows:
            left.pop(row.get("side", ""), None)
            yield row
    except Exception as error:
        why = failure(error)
        for side, name in left.items():
            yield {"model": name, "side": side, "error": why}


def _of_shape(shape: Shape, rounds: Rounds, device: str) -> Iterator[Row]:
    m, k, n = shape
    a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
    calls, fit = _calls(a, b), list[str]()
    operations = 2 * m * k * n
    for side, row in _timed(calls, operations / 6e11, rounds, BFLOAT16, device):
        if "ms" in row:
            fit.append(side)
            row["tflops"] = round(operations / row["ms"] / 1e9, 2)
        yield {"model": _product(shape), "side": side, **row}
    exact = a[:COMPARED].double() @ b.double().t()
    far = {side: distance(calls[side]()[:COMPARED], exact) for side in SIDES if side in fit}
    yield {"model": _linear(shape), **far}


def _calls(a: Tensor, b: Tensor) -> Mapping[str, Callable[[], Tensor]]:
    """Return the sides of the product of ``a`` and the transpose of ``b``, as a linear layer computes it."""

    def scaled(dtype: torch.dtype, dim: int | None, fast: bool) -> Callable[[], Tensor]:
        (low, factor), (other, others) = quantised(a, dtype, dim), quantised(b, E4M3, dim)
        options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(low, other.t(), scale_a=factor, scale_b=others.t(), **options)

    sides = (E4M3, None, True), (E4M3, 1, True), (E5M2, 1, False)  # gradients are summed up with all bits
    return {BFLOAT16: lambda: functional.linear(a, b), **{s: scaled(*o) for s, o in zip(SIDES[1:], sides, strict=True)}}


def _of_size(
    name: str, size: Size, sides: Mapping[str, Quantiser | str], baseline: str, rounds: Rounds, device: str
) -> Iterator[Row]:
    x = torch.randn(size, device=device, dtype=torch.bfloat16)
    calls = dict[str, Callable[[], object]]()
    for side, function in sides.items():
        if isinstance(function, str):
            yield {"model": name, "side": side, "error": function}
        else:
            calls[side] = lambda function=function: function(x)
    for side, row in _timed(calls, 3 * x.numel() / 3e9, rounds, baseline, device):
        if "ms" in row:
            found: Any = calls[side]()
            written = sum(t.nbytes for t in ((found,) if isinstance(found, Tensor) else found))
            row["gb_per_second"] = round((x.nbytes + written) / row["ms"] / 1e6, 1)
        yield {"model": name, "side": side, **row}


def _compiled(wanted: Sequence[tuple[Size, str, Quantiser]], device: str, seconds: float) -> Compiled:
    """Compile each quantiser for its size, while there is time."""
    found = dict[tuple[Size, str], Quantiser | str]()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, len(wanted) + 1)
    ends = time.monotonic() + seconds
    for size, name, function in wanted:
        if time.monotonic() >= ends:
            found[size, name] = f"not compiled within {seconds:g} s"
            continue
        try:
            compiled: Quantiser = torch.compile(function, dynamic=False, fullgraph=True)
            compiled(torch.zeros(size, device=device, dtype=torch.bfloat16))
            found[size, name] = compiled
        except Exception as error:  # of this one; it becomes a row
            found[size, name] = failure(error)
    return found


def _timed(
    calls: Mapping[str, Callable[[], object]], expected: float, rounds: Rounds, baseline: str, device: str
) -> Iterator[tuple[str, Row]]:
    """Yield each side with its milliseconds, and quartiles of the ratios to the baseline in the same round.

    A measurement repeats a call until it takes about a millisecond, of which the start of a graph is a small part.
    ``expected`` are the milliseconds of one call.
    """
    repeats = max(1, min(50, round(1 / expected))) if device == "cuda" else 1
    work = dict[str, Work]()
    for side, call in calls.items():
        try:
            work[side] = Work({"calls": _replayed(call, repeats) if device == "cuda" else call})
        except Exception as error:  # of this side; the others are measured
            yield side, {"error": failure(error)}
    *_, times = interleaved(work, rounds, device)
    for side, row in timed(times, rounds, baseline, baseline).items():
        if "error" not in row:
            spent = {"ms": round(row.pop("calls_ms") / repeats, 5), f"to_{baseline}": row[f"calls_to_{baseline}"]}
            row = {key: row[key] for key in ("rounds", "partial") if key in row} | spent
        yield side, row


def _replayed(call: Callable[[], object], repeats: int) -> Callable[[], object]:
    """Record the repeated call in a CUDA graph, after calls on a stream of their own, and return what replays it."""
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()

    def replay() -> object:
        graph.replay()
        return call  # which holds the tensors that the graph reads

    return replay
