"""``lint``: find sizes that tensor cores would have to pad, and estimate where a converted model's time would go."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from autocastfx.errors import ArgumentTypeError, GpuError, UnsupportedError, listed
from autocastfx.graph.cell import aligned
from autocastfx.graph.names import op_name
from autocastfx.graph.node import attributes_of, origin
from autocastfx.graph.walk import Located, walk
from autocastfx.plan.plan import ALIGNED_PRODUCT, NoFloat8, Plan, Precision
from autocastfx.report.dump import view_of
from autocastfx.report.lint.odd_size import OddSize, odd_sizes
from autocastfx.report.lint.roofline import Gpu, Total, Work, bound, find_gpu, limit, total, work_of
from autocastfx.report.unfused import unfused_attention
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.working_copies import quantized_copy

# The result of ``lint``, as data and as text.

_MOST = 10
_MOST_SIZES = 20
_UNITS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
LAUNCH = 5e-6  # seconds that starting a kernel takes an eager model, roughly: the host's work, not the GPU's
_UNSEEN = (
    "not counted: starting kernels, caches, fusing by a compiler, how near a kernel comes to peak, TF32, FLOP outside "
    "of products; of cond, scan and loops each graph counts once, and a size that depends on data as 1"
)


@dataclass(frozen=True)
class OpEstimate:
    """An op or a cast of the converted graph, with the least time that it can take.

    Attributes:
        node, op, module: the node's; for a node that the conversion made, ``module`` is ``for`` and a value's name.
        reads: names of the dtypes that it reads, each once.
        flops: operations of matrix products and convolutions; 0 for other ops; None if not counted.
        bytes: bytes read and written.
        intensity: FLOP per byte.
        bound: ``"memory"`` or ``"compute"``.
        seconds: max(FLOP / peak, bytes / bandwidth).
        in_float8: it is a product in float8, at the GPU's rate for these.
    """

    node: str
    op: str
    module: str
    reads: tuple[str, ...]
    flops: int | None
    bytes: int
    intensity: float
    bound: str
    seconds: float
    in_float8: bool = False


@dataclass(frozen=True)
class Lint:
    """The findings of ``lint``. ``str`` gives them as text.

    Attributes:
        gpu: the GPU with its peak rates.
        low: the 16-bit dtype.
        device: the device type that the plan was made for.
        variant: a description of the variant.
        odd_sizes: sizes that tensor cores would have to pad, in graph order.
        float32_products: names of the matrix products and convolutions that stay in float32.
        ops: the converted graph's ops that move bytes, in graph order.
        before: the least time of the captured graph, in float32.
        after: the least time of the converted graph, casts included.
        padded: products of odd sizes that the conversion has padded; no odd size is told of them.
        out_of_float8: for each product that a size keeps out of float8 its node, the size's name, the size, and what it
            should be a multiple of.
        unfused: for each attention that no fused kernel takes its node, and what to do.
    """

    gpu: Gpu
    low: str
    device: str
    variant: str
    odd_sizes: tuple[OddSize, ...]
    float32_products: tuple[str, ...]
    ops: tuple[OpEstimate, ...]
    before: Total
    after: Total
    padded: tuple[str, ...] = ()
    out_of_float8: tuple[tuple[str, str, int, int], ...] = ()
    unfused: tuple[tuple[str, str], ...] = ()

    @property
    def speedup(self) -> float:
        """The least time of the captured graph over the converted one's; 1 if nothing takes time."""
        return self.before.seconds / self.after.seconds if self.after.seconds else 1.0

    @property
    def limit(self) -> float:
        """The largest speed-up that faster products alone can give, by Amdahl's law."""
        return limit(self.before.share, math.inf)

    @property
    def launches(self) -> float:
        """The seconds that starting the converted graph's kernels takes, roughly: 5 µs each."""
        return LAUNCH * len(self.ops)

    @property
    def is_small(self) -> bool:
        """True if starting the kernels takes longer than they do, so that neither sizes nor dtypes decide."""
        return self.launches > self.after.seconds

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Names of ops whose FLOP are not counted: they are not ATen's, or cannot run on abstract values."""
        return tuple(op.node for op in self.ops if op.flops is None)

    @property
    def _has_float8(self) -> bool:
        return any(op.in_float8 for op in self.ops)

    def to_json(self) -> str:
        """Write the findings as JSON text; ``limit`` is null if infinite."""
        limit = self.limit if math.isfinite(self.limit) else None
        derived = {"speedup": self.speedup, "limit": limit, "uncounted": self.uncounted}
        derived |= {"launches": self.launches, "is_small": self.is_small}
        return json.dumps({**asdict(self), **derived}, indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        gpu = self.gpu
        yield f"lint: {self.low} on {gpu.name}, variant {self.variant}"
        in_float8 = f"{gpu.float8_tflops:,g} in float8, " if self._has_float8 else ""
        yield (
            f"rates: {gpu.tensor_tflops:g} TFLOP/s in tensor cores, {in_float8}{gpu.float32_tflops:g} in float32, "
            f"{gpu.bandwidth_gb_s:,g} GB/s ({gpu.source})"
        )
        if self.device != "cuda":
            yield f'the plan was decided for kernels of {self.device}: convert(..., device="cuda") decides for a GPU\'s'
        if self.is_small:
            yield (
                f"small: starting {len(self.ops)} kernels takes about {_time(self.launches)}, they themselves "
                f"{_time(self.after.seconds)}, so sizes and dtypes decide little here. Convert with inputs as large as "
                "the real ones; if these are, a CUDA graph or torch.compile helps more."
            )
        yield ""
        yield from self._sizes()
        yield ""
        yield from self._times()

    def _sizes(self) -> Iterator[str]:
        if not any(op.flops and (self.low in op.reads or op.in_float8) for op in self.ops):
            yield f"sizes: no product is known to run in {self.low}"
        elif not self.odd_sizes:
            yield f"sizes: all products in {self.low} have multiples of 8"
        else:
            yield f"sizes of products in {self.low} that are no multiple of 8, those of weights first:"
            rows = list(self._odd_rows())
            titles = ("size", "is", "padded", "wasted", "given by", "node", "op", "module", "of the time")
            yield from aligned([titles, *rows[:_MOST_SIZES]])
            if len(rows) > _MOST_SIZES:
                yield f"and {len(rows) - _MOST_SIZES} more"
            said = "input: calls, whose sizes differed; activation: the call, or computed"
            yield f"given by: a weight, which is the model's choice; {said}"
        if self.padded:
            yield f"of odd sizes, and padded when they were converted: {listed(self.padded, _MOST)}"
        for multiple in sorted({one[3] for one in self.out_of_float8}):
            sizes = (one[:3] for one in self.out_of_float8 if one[3] == multiple)
            padded = [f"{name} of {node} from {n} to {-(-n // multiple) * multiple}" for node, name, n in sizes]
            yield f"float8 takes multiples of {multiple}; pad {listed(padded, _MOST)}"
        for node, remedy in self.unfused[:_MOST]:
            yield f"no fused attention takes {node}: {remedy}"
        if self.float32_products:
            yield f"products that stay in float32, without tensor cores: {listed(self.float32_products, _MOST)}"

    def _odd_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row per odd size, weights first, then by share of the time; equal sizes share a row."""
        times = {op.node: op.seconds / self.after.seconds for op in self.ops} if self.after.seconds else {}
        groups: dict[tuple[str, ...], list[OddSize]] = {}
        for odd in self.odd_sizes:
            groups.setdefault((odd.name, odd.operand, str(odd.size), odd.table_of), []).append(odd)
        shares = {key: sum(times.get(odd.node, 0.0) for odd in odds) for key, odds in groups.items()}
        for key in sorted(groups, key=lambda key: (key[1] in ("input", "activation"), -shares[key])):
            yield (*_of_sizes(groups[key]), f"{shares[key]:.1%}")

    def _times(self) -> Iterator[str]:
        yield "least time of one forward pass, estimated: max(FLOP / peak, bytes / bandwidth) of each op, added up"
        rows = [_of_total("as captured, float32", self.before), _of_total("as converted", self.after)]
        yield from aligned([("", "all", "products", "share"), *rows])
        faster = self.before.in_products / self.after.in_products if self.after.in_products else 1.0
        share = self.before.share
        yield f"speed-up: {self.speedup:.2f}; of the products alone: {faster:.2f}"
        most = f"{self.limit:.2f} however fast they became" if math.isfinite(self.limit) else "without limit beyond"
        yield (
            f"Amdahl's law, 1 / (1 - share + share / speed-up of the products): {limit(share, faster):.2f} if only the "
            f"products were faster, and {most}"
        )
        yield ""
        tensor, float32 = (self.gpu.balance(tensor_cores=cores) for cores in (True, False))
        float8 = f"{self.gpu.balance(tensor_cores=True, in_float8=True):.0f} in float8, " if self._has_float8 else ""
        yield (
            f"ops that take longest. Below {tensor:.0f} FLOP a byte in {self.low}, {float8}{float32:.0f} in float32, "
            "memory is the bound:"
        )
        ranked = sorted(self.ops, key=lambda op: -op.seconds)
        titles = ("node", "op", "module", "reads", "FLOP", "bytes", "FLOP/byte", "bound", "time")
        yield from aligned([titles, *(_of_op(op) for op in ranked[:_MOST])])
        if len(ranked) > _MOST:
            rest = sum(op.seconds for op in ranked[_MOST:])
            yield f"{len(ranked) - _MOST} more ops and casts: {_time(rest)}"
        yield _UNSEEN
        if self.uncounted:
            yield f"FLOP not known of: {listed(self.uncounted, _MOST)}"


def _of_sizes(odds: Sequence[OddSize]) -> tuple[str, ...]:
    first, more = odds[0], f" and {len(odds) - 1} more" if len(odds) > 1 else ""
    given_by = f"{first.operand}, the table of {first.table_of}" if first.table_of else first.operand
    numbers = (str(first.size), str(first.padded), f"{first.wasted:.1%}")
    return first.name, *numbers, given_by, first.node + more, first.op, first.module or "(root)"


def _of_op(op: OpEstimate) -> tuple[str, ...]:
    flops = "?" if op.flops is None else f"{op.flops:,}" if op.flops else "-"
    intensity = f"{op.intensity:,.3g}" if op.flops else "-"
    return (
        op.node,
        op.op,
        op.module,
        ", ".join(op.reads),
        flops,
        f"{op.bytes:,}",
        intensity,
        op.bound,
        _time(op.seconds),
    )


def _of_total(what: str, times: Total) -> tuple[str, ...]:
    return what, _time(times.seconds), _time(times.in_products), f"{times.share:.0%}"


def _time(seconds: float) -> str:
    unit, size = next(((u, s) for u, s in reversed(_UNITS) if seconds >= s), _UNITS[0])
    return f"{seconds / size:.3g} {unit}"


def lint(amp_model: AmpModule, gpu: Gpu | str = "A100") -> Lint:
    """Find sizes that tensor cores would have to pad, and estimate the time of a forward pass on a GPU.

    Runs nothing and needs no GPU: it uses the sizes of the example inputs, the dtypes of the plan and the GPU's peak
    rates, for the variant of ``amp_model.plan``. The backward pass is not counted: a product's backward is two products
    of the same sizes, so it has the same odd sizes.

    Args:
        amp_model: a model converted from example inputs, or called once. Without a GPU, convert with
            ``device="cuda"`` to decide for a GPU's kernels.
        gpu: a GPU's name or its rates. Known are ``"V100"``, ``"T4"``, ``"A100"``, ``"A100-80GB"``, ``"L4"``,
            ``"L40S"``, ``"RTX 4090"``, ``"RTX 5090"``, ``"H100"``, ``"H200"``, ``"B200"`` and ``"MI300X"``.

    Raises:
        GpuError: no GPU is known by this name, or its tensor cores cannot take the model's 16-bit dtype, or products
            run in float8 and no such rate of it is known.
        NotCapturedError: the model was converted without inputs and not called yet, so that no size is known.
        UnsupportedError: the float32 graph is not at hand: the model has ``weights="low"``.
        TypeError: ``amp_model`` is not a converted model.
    """
    if not isinstance(amp_model, AmpModule):
        raise ArgumentTypeError(
            f"lint takes what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    rates = find_gpu(gpu) if isinstance(gpu, str) else gpu
    plan, graph = amp_model.plan, amp_model.graph
    if plan.low not in rates.dtypes:
        raise GpuError(
            f"the tensor cores of {rates.name} take {', '.join(rates.dtypes)}, not {plan.low}: choose another GPU, or "
            f"convert with dtype=torch.{rates.dtypes[0]}."
        )
    captured = amp_model._active.captured
    if captured is None:
        raise UnsupportedError(
            'lint compares with the float32 graph, which weights="low" does not keep: convert the model again, with '
            'weights="cached".'
        )
    # the work of each node, as captured and as converted
    located = tuple(walk(captured.graph, captured.attributes))
    before = {one.name: work_of(one.node) for one in located}
    copies = {copy.name for copy in plan.copies}  # renewed when a parameter has changed, not in each pass
    converted = walk(graph, attributes_of(amp_model, graph))
    computed = (one for one in converted if one.name not in copies and one.node.target is not quantized_copy)
    after = [(one, work_of(one.node)) for one in computed]
    # products in 16 bits, whose sizes matter to tensor cores
    products = {name: work.flops for name, work in before.items() if work.flops}
    run_low = {n.name for n in plan.nodes if n.placement.run is Precision.LOW or plan.low in n.dtype.split(",")}
    low = {name: flops for name, flops in products.items() if name in run_low}
    padded = tuple(one.node for one in plan.recomposed if one.pattern == ALIGNED_PRODUCT)
    return Lint(
        gpu=rates,
        low=plan.low,
        device=plan.device,
        variant=view_of(amp_model).variant,
        odd_sizes=tuple(o for o in odd_sizes(located, low, amp_model._held()) if o.node not in padded),
        padded=padded,
        float32_products=tuple(name for name in products if name not in low),
        ops=_estimates(after, plan, rates),
        before=total(before.values(), rates),
        after=total((work for _, work in after), rates),
        out_of_float8=tuple(_out_of_float8(plan)),
        unfused=tuple(unfused_attention(graph.nodes)),
    )


def _out_of_float8(plan: Plan) -> Iterator[tuple[str, str, int, int]]:
    for node in plan.nodes:
        reasons = dict.fromkeys(one.why for one in node.float8.in_16_bits) if node.float8 is not None else ()
        odd = (why.words for why in reasons if why.why is NoFloat8.ODD_SIZE)
        yield from ((node.name, name, int(size), int(multiple)) for name, size, multiple in odd)


def _estimates(after: Iterable[tuple[Located, Work]], plan: Plan, gpu: Gpu) -> tuple[OpEstimate, ...]:
    nodes, casts = {n.name: n for n in plan.nodes}, {cast.name for cast in plan.casts}
    estimates: list[OpEstimate] = []
    for one, work in after:
        if not work.bytes:
            continue
        planned, mark = nodes.get(one.name), origin(one.node)
        op = planned.op if planned is not None else "cast" if one.name in casts else op_name(one.node)
        module = planned.module or "(root)" if planned is not None else f"for {mark.value}" if mark is not None else ""
        time = bound(work, gpu)
        estimates.append(
            OpEstimate(
                *(one.name, op, module, work.reads, work.flops, work.bytes, time.intensity, time.by, time.seconds),
                in_float8=work.in_float8,
            )
        )
    return tuple(estimates)
