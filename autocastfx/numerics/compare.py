"""``compare``: measure the deviation of a converted model from the float32 graph, node by node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, arguments_of
from autocastfx.capture.leave_intact import isolated
from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import ArgumentError, SensitivityError, VariantError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, module_path, uncast
from autocastfx.numerics.logprob_gap import Inputs, LossFunction, loss_of
from autocastfx.numerics.node_effects import gradient_scale
from autocastfx.numerics.paired_run import Gradients, Loss, PairedRun, Step, floating, run_backwards, run_side_by_side
from autocastfx.plan.plan import PlannedNode, Precision
from autocastfx.plan.proposed_list import op_list_for
from autocastfx.plan.sensitivity import rms
from autocastfx.report.comparison import (
    Cancellation,
    ComparedNode,
    ComparedParameter,
    ComparedVariant,
    Comparison,
    Deviation,
)
from autocastfx.runtime.amp_module import AmpModule


def compare(
    model: nn.Module | None,
    amp_model: AmpModule,
    *inputs: Any,
    gradients: bool = False,
    loss: Loss | None = None,
    scale: float | None = None,
    **kwargs: Any,
) -> Comparison:
    """Run a converted model and the float32 graph on one call, with the same random numbers, and compare each value.

    Both graphs run node by node and keep only values that are still needed. Buffers, inputs, gradients and the state of
    torch's random numbers are unchanged afterwards, also in training mode. The modes are those of ``amp_model``.
    Regions under ``no_grad`` and ``torch.autocast`` are compared inside; ``torch.cond`` and loops count as one node.

    With ``gradients`` both graphs then run backwards side by side. This takes about the memory of a training step of
    the converted model plus one in float32: the tensors saved for backward, freed on the way, and the gradients that
    are still needed.

    Args:
        model: the float32 original, for its parameters and buffers; None: the float32 graph uses those of
            ``amp_model``, which by default are the original's. If the original is 16-bit itself, None compares with it,
            as captured, and ``model`` may be it in float32.
        amp_model: a converted model.
        *inputs: positional inputs of the call; or one dict, of its keyword inputs.
        gradients: also compare the gradients of the loss with respect to each value and parameter.
        loss: a function from the model's output to one number; by default the sum of its floating-point tensors, in
            float32.
        scale: a loss scale for the gradients of both graphs; 1 by default.
        **kwargs: keyword inputs of the call. If the model's forward has a parameter called ``loss`` or ``scale``, this
            name means the input.

    Raises:
        TypeError: the arguments do not fit the forward, or ``amp_model`` is not a converted model.
        VariantError: no variant fits; or ``model`` is None and the float32 graph is not at hand, as after unpickling
            and with ``weights="low"``.
        CaptureError: ``model`` cannot be captured.
        CalibrationError: the loss does not depend on anything that requires a gradient.
        NodeError: a node raises; the message has its line, and an op list that runs it in float32.
        ValueError: ``model`` has other parameters or buffers than ``amp_model``; ``loss`` does not return a single
            number; ``scale`` is not a finite number above 0; or one of them is given without ``gradients``.
    """
    if isinstance(amp_model, AmpModule):
        parameters = {parameter.name for parameter in CallSignature.of(amp_model.forward).parameters}
        kwargs.update({n: v for n, v in (("loss", loss), ("scale", scale)) if n in parameters and v is not None})
        loss, scale = (None if "loss" in parameters else loss), (None if "scale" in parameters else scale)
    if not gradients and (loss is not None or scale is not None):
        raise ArgumentError("loss and scale are for gradients: give gradients=True as well, or leave them out")
    factor = 1.0 if scale is None else scale
    if not 0 < factor < math.inf:
        raise ArgumentError(f"scale is a finite number above 0, not {factor}")
    run = run_side_by_side(model, amp_model, inputs, kwargs, gradients=gradients)
    return _comparison(run, amp_model, gradients, loss, factor)


def compare_call(amp_model: AmpModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss) -> Comparison:
    """Compare the values and gradients of a call, as :func:`compare` does, whatever its inputs are called."""
    return _comparison(run_side_by_side(None, amp_model, args, kwargs, gradients=True), amp_model, True, loss, 1.0)


def _comparison(run: PairedRun, amp_model: AmpModule, gradients: bool, loss: Loss | None, scale: float) -> Comparison:
    if run.full is None:
        raise VariantError(
            "the float32 graph is not at hand: the model was unpickled, or its weights are stored in 16 bits. Give "
            "compare the float32 model as its first argument."
        )
    nodes, cancellations = _values(run)
    leaves: list[ComparedParameter] = []

    def take(pair: Gradients) -> None:
        deviation = Deviation.of(pair.low, pair.full)
        if pair.is_leaf:
            leaves.append(ComparedParameter(**vars(deviation), name=pair.name))
        elif pair.name in nodes:
            nodes[pair.name] = replace(nodes[pair.name], gradient=deviation)

    if gradients:
        run_backwards(run, loss, scale, take)
    return Comparison(
        nodes=tuple(nodes.values()),
        skipped=run.unmatched,
        whole=run.low.flat.whole,
        parameters=_named(leaves, amp_model._held()),
        scale=scale if gradients else None,
        variant=ComparedVariant.of(run.variant),
        recomposed=run.variant.plan.recomposed,
        cancellations=cancellations,
    )


# Measure the relative error of a converted model's gradient, or output, on batches: what a sensitivity predicts.


@dataclass
class TargetDistance:
    """The target of a float32 model on batches, and the distance of other models from it.

    Buffers, gradients, attributes of the float32 model and the state of torch's random numbers are unchanged
    afterwards; each batch runs with the same random numbers in every model.

    Attributes:
        model: the float32 model.
        batches: kept, as are their targets: as many numbers as the model has parameters, for each.
        loss_fn, of, inputs: as for :func:`sensitivity`.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss_fn: LossFunction | None
    of: str
    inputs: Inputs | None
    _expected: list[tuple[list[torch.Tensor], float, float]] = field(init=False)

    def __post_init__(self) -> None:
        """Run the float32 model.

        Raises:
            SensitivityError: a target is zero or not finite.
        """
        self._expected = []
        for i, batch in enumerate(self.batches):
            target = self._target(self.model, batch, i, 1.0)
            norm = _norm(target)
            if not 0 < norm < math.inf:
                raise SensitivityError(f"the {self.of} of batch {i} is zero or not finite in float32: leave it out.")
            self._expected.append((target, norm, max((float(t.abs().max()) for t in target if t.numel()), default=0.0)))

    def __call__(self, amp_model: nn.Module, low: torch.dtype) -> float:
        """Measure the root mean square over the batches; infinite if a value overflows.

        The model was converted from the float32 model, with its parameters, to the dtype ``low``.
        """
        distances: list[float] = []
        for i, (batch, (expected, norm, largest)) in enumerate(zip(self.batches, self._expected, strict=True)):
            scale = gradient_scale(largest, low) / 16 if self.of == "gradient" else 1.0
            target = self._target(amp_model, batch, i, max(1.0, scale))
            distance = _norm(x - y for x, y in zip(target, expected, strict=True)) / norm
            distances.append(distance if math.isfinite(distance) else math.inf)
        return rms(distances)

    def _target(self, model: nn.Module, batch: Any, seed: int, scale: float) -> list[torch.Tensor]:
        args, kwargs = arguments_of(batch if self.inputs is None else self.inputs(batch))
        with_gradients, autocast_off = self.of == "gradient", cast("Any", torch._C)._DisableAutocast()
        with isolated(*dict.fromkeys((self.model, model))), torch.set_grad_enabled(with_gradients), autocast_off:
            torch.manual_seed(seed)
            output = model(*args, **kwargs)
            if self.of == "output":
                made = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
                return [t.detach().float() for t in made if t.is_floating_point()]
            loss = loss_of(output, batch, self.loss_fn) * scale
            wanted = [p for p in self.model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        given = cast("Sequence[torch.Tensor | None]", gradients)
        return [torch.zeros_like(p) if g is None else g.to_dense() / scale for g, p in zip(given, wanted, strict=True)]


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _values(run: PairedRun) -> tuple[dict[str, ComparedNode], tuple[Cancellation, ...]]:
    """Compute the deviation of each node's values, by name, and where values cancelled. Keeps no values."""
    planned = {node.name: node for node in run.variant.plan.nodes}
    nodes: dict[str, ComparedNode] = {}
    cancellations: list[Cancellation] = []
    inherited: dict[fx.Node, tuple[float, str]] = {}  # the error, and the node at which values cancelled
    for step in run.steps():
        error, behind = max((inherited.get(read, _EXACT) for read in step.node.all_input_nodes), default=_EXACT)
        node = _compared(step, planned.get(step.name), error)
        if node is not None and (cancellation := _cancellation(run, step, node, planned)) is not None:
            cancellations.append(cancellation)
            behind = node.name
        inherited[step.node] = (node.severity if node is not None else error, behind)
        if node is not None:
            nodes[node.name] = replace(node, cancels=behind)
    return nodes, tuple(cancellations)


# Find sums and differences of nearly equal values, and the nodes that round these.

_EXACT = (0.0, "")
_SUMS = ("add", "sub", "rsub")
_RATIO = 8.0  # how many times larger the operands are: three bits of the result are lost
_GROWTH = 3.0  # how many times the error grows: more than by a sum of two values alike


def _cancellation(
    run: PairedRun, step: Step, node: ComparedNode, planned: Mapping[str, PlannedNode]
) -> Cancellation | None:
    """What a node cancels; None if it is no sum of nearly equal values, or these were not rounded."""
    is_far = math.isfinite(node.severity) and node.error > _GROWTH * node.inherited
    if op_name(step.node) not in _SUMS or not is_far or not step.node.all_input_nodes:
        return None
    (result,) = floating(step.reference)
    values = {read: floating(run.low.env[read]) for read in step.node.all_input_nodes}
    largest = max((_size(value[0]) for value in values.values() if len(value) == 1), default=0.0)
    ratio = largest / size if (size := _size(result)) else math.inf
    if ratio < _RATIO:
        return None
    entry = planned.get(step.name)
    guilty = [entry] if entry is not None and entry.placement.run is Precision.LOW else []
    names, rounded_to = list[str](), list[str]()
    for read in values:
        found = _rounded(run, read, planned)
        if found is None:
            continue
        names.append(run.names[uncast(read)])
        rounded_to.append(found[0])
        guilty += found[1]
    if not names:
        return None
    listed = list({one.name: one for one in guilty if op_list_for([one])}.values())
    return Cancellation(
        node=node.name,
        op=op_name(step.node),
        operands=tuple(dict.fromkeys(names)),
        rounded_in=tuple(dict.fromkeys(one.name for one in guilty if one is not entry)),
        dtype=",".join(dict.fromkeys(rounded_to)),
        ratio=ratio,
        fix=op_list_for(listed),
    )


def _size(value: torch.Tensor) -> float:
    """The root mean square, of the finite elements."""
    value = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    finite = value[value.isfinite()]
    return float(finite.double().square().mean().sqrt()) if finite.numel() else 0.0


def _rounded(run: PairedRun, read: fx.Node, planned: Mapping[str, PlannedNode]) -> tuple[str, list[PlannedNode]] | None:
    """The 16-bit dtype that a value was rounded to on its way, and the nodes that ran in it; None if there is none.

    A node of one input that only follows its neighbours is looked through: it rounds what is rounded already.
    """
    waiting, seen, dtype = [read], set[fx.Node](), ""
    guilty, followers = list[PlannedNode](), list[PlannedNode]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        entry = planned.get(run.names.get(node, ""))
        dtype = dtype or next((dtype_name(one) for one in dtypes(node) if one in LOW_DTYPES), "")
        if entry is not None and entry.placement.run is Precision.LOW:
            follows = entry.decision.category.is_free and len(node.all_input_nodes) == 1
            (followers if follows else guilty).append(entry)
            if not follows:
                continue
        waiting += node.all_input_nodes
    return (dtype, guilty or followers) if dtype else None


def _compared(step: Step, planned: PlannedNode | None, inherited: float) -> ComparedNode | None:
    """Compute the deviation of a node's values; None if the graphs do not both have them."""
    ours, theirs = floating(step.value), floating(step.reference)
    if step.twin is None or not ours or [t.shape for t in ours] != [t.shape for t in theirs]:
        return None
    return ComparedNode(
        **vars(Deviation.of(ours, theirs)),
        name=step.name,
        op=op_name(step.twin),
        module=module_path(step.twin),
        precision=str(planned.placement.run) if planned is not None else "",
        inherited=inherited,
        predicted=planned.error if planned is not None else None,
    )


def _named(parameters: list[ComparedParameter], tensors: Mapping[str, torch.Tensor]) -> tuple[ComparedParameter, ...]:
    """Rename tied parameters to their first name, and sort by the model's order; inputs of the call come last."""
    first = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    renamed = [replace(p, name=first[id(tensors[p.name])]) if p.name in tensors else p for p in parameters]
    places = {name: place for place, name in enumerate(tensors)}
    return tuple(sorted(renamed, key=lambda parameter: places.get(parameter.name, len(places))))
