"""``lint``: find sizes that tensor cores would have to pad, and estimate where a converted model's time would go."""

from __future__ import annotations

from collections.abc import Iterable

from autocastfx.errors import GpuError, NotCapturedError, UnsupportedError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import attribute, origin
from autocastfx.graph.walk import Located, walk
from autocastfx.plan.plan import Plan, Precision
from autocastfx.report.dump import view_of
from autocastfx.report.lint.findings import Lint, OpEstimate
from autocastfx.report.lint.gpu import Gpu, find_gpu
from autocastfx.report.lint.odd_size import odd_sizes
from autocastfx.report.lint.roofline import bound, total
from autocastfx.report.lint.work import Work, work_of
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["lint"]


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
        GpuError: no GPU is known by this name, or its tensor cores cannot take the model's 16-bit dtype.
        NotCapturedError: the model was converted without inputs and not called yet, so that no size is known.
        UnsupportedError: the float32 graph is not at hand: the model was unpickled, or has ``weights="low"``.
        TypeError: ``amp_model`` is not a converted model.
    """
    if not isinstance(amp_model, AmpModule):
        raise TypeError(
            f"lint takes what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    rates = find_gpu(gpu) if isinstance(gpu, str) else gpu
    plan, graph = amp_model.plan, amp_model.graph
    _check(plan, rates)
    captured = next(variant for variant in amp_model._shown if variant.graph is graph).captured
    if captured is None:
        raise UnsupportedError(
            'lint compares with the float32 graph, which an unpickled model and weights="low" do not keep: convert the '
            'model again, with weights="cached".'
        )
    located = tuple(walk(captured.graph, captured.attributes))
    before = {one.name: work_of(one.node) for one in located}
    held = {str(n.target): attribute(amp_model, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    copies = {copy.name for copy in plan.copies}  # renewed when a parameter has changed, not in each pass
    after = [(one, work_of(one.node)) for one in walk(graph, held) if one.name not in copies]
    products = {name: work.flops for name, work in before.items() if work.flops}
    low = {name: flops for name, flops in products.items() if name in _low(plan)}
    return Lint(
        gpu=rates,
        low=plan.low,
        device=plan.device,
        variant=view_of(amp_model).variant,
        odd_sizes=tuple(odd_sizes(located, low, amp_model._held())),
        float32_products=tuple(name for name in products if name not in low),
        ops=_estimates(after, plan, rates),
        before=total(before.values(), rates),
        after=total((work for _, work in after), rates),
    )


def _check(plan: Plan, gpu: Gpu) -> None:
    if plan.unverified:
        raise NotCapturedError(
            "lint reads sizes, and a model converted without inputs has none before its first call: call the model "
            "once, or give convert the inputs of one call."
        )
    if plan.low not in gpu.dtypes:
        raise GpuError(
            f"the tensor cores of {gpu.name} take {', '.join(gpu.dtypes)}, not {plan.low}: choose another GPU, or "
            f"convert with dtype=torch.{gpu.dtypes[0]}."
        )


def _low(plan: Plan) -> frozenset[str]:
    """Return the names of the nodes that run in 16 bits."""
    return frozenset(n.name for n in plan.nodes if n.placement.run is Precision.LOW or plan.low in n.dtype.split(","))


def _estimates(after: Iterable[tuple[Located, Work]], plan: Plan, gpu: Gpu) -> tuple[OpEstimate, ...]:
    nodes, casts = {n.name: n for n in plan.nodes}, {cast.name for cast in plan.casts}
    found: list[OpEstimate] = []
    for one, work in after:
        if not work.bytes:
            continue
        planned, mark = nodes.get(one.name), origin(one.node)
        op = planned.op if planned is not None else "cast" if one.name in casts else op_name(one.node)
        module = planned.module or "(root)" if planned is not None else f"for {mark.value}" if mark is not None else ""
        time = bound(work, gpu)
        found.append(
            OpEstimate(one.name, op, module, work.reads, work.flops, work.bytes, time.intensity, time.by, time.seconds)
        )
    return tuple(found)
