"""``compare``: measure the deviation of a converted model from the float32 graph, node by node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, arguments_of
from autocastfx.capture.leave_intact import intact, random_numbers_kept
from autocastfx.errors import ArgumentError, SensitivityError, VariantError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import module_path
from autocastfx.numerics.logprob_gap import Inputs, LossFunction, loss_of
from autocastfx.numerics.node_effects import gradient_scale
from autocastfx.numerics.paired_run import Loss, PairedRun, Step, floating, run_backwards, run_side_by_side
from autocastfx.plan.plan import PlannedNode
from autocastfx.report.comparison import ComparedNode, ComparedParameter, ComparedVariant, Comparison, Deviation
from autocastfx.runtime.amp_module import AmpModule

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

        Args:
            amp_model: converted from the float32 model, with its parameters.
            low: the 16-bit dtype, for the loss scale of gradients.
        """
        squares: list[float] = []
        for i, (batch, (expected, norm, largest)) in enumerate(zip(self.batches, self._expected, strict=True)):
            scale = gradient_scale(largest, low) / 16 if self.of == "gradient" else 1.0
            target = self._target(amp_model, batch, i, max(1.0, scale))
            distance = _norm(x - y for x, y in zip(target, expected, strict=True)) / norm
            squares.append(distance * distance if math.isfinite(distance) else math.inf)
        return math.sqrt(sum(squares) / len(squares))

    def _target(self, model: nn.Module, batch: Any, seed: int, scale: float) -> list[torch.Tensor]:
        args, kwargs = arguments_of(batch if self.inputs is None else self.inputs(batch))
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            with ExitStack() as modes:
                modes.enter_context(random_numbers_kept())
                if model is self.model:  # whose own forward runs, and may set attributes
                    modes.enter_context(intact(model, [module.training for module in model.modules()], {}))
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.set_grad_enabled(self.of == "gradient"))
                torch.manual_seed(seed)
                output = model(*args, **kwargs)
                if self.of == "output":
                    made = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
                    return [t.detach().float() for t in made if t.is_floating_point()]
                loss = loss_of(output, batch, self.loss_fn) * scale
                wanted = [p for p in self.model.parameters() if p.requires_grad]
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        given = cast("Sequence[torch.Tensor | None]", gradients)
        return [torch.zeros_like(p) if g is None else g / scale for g, p in zip(given, wanted, strict=True)]


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


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
    if run.full is None:
        raise VariantError(
            "the float32 graph is not at hand: the model was unpickled, or its weights are stored in 16 bits. Give "
            "compare the float32 model as its first argument."
        )
    nodes = _values(run)
    leaves: list[ComparedParameter] = []
    if gradients:
        for pair in run_backwards(run, loss, factor):
            if not pair.low:
                continue
            deviation = Deviation.of(pair.low, pair.full)
            if pair.is_leaf:
                leaves.append(ComparedParameter(**vars(deviation), name=pair.name))
            elif pair.name in nodes:
                nodes[pair.name] = replace(nodes[pair.name], gradient=deviation)
    return Comparison(
        nodes=tuple(nodes.values()),
        skipped=run.unmatched,
        whole=run.whole,
        parameters=_named(leaves, amp_model._held()),
        scale=factor if gradients else None,
        variant=ComparedVariant.of(run.variant),
        recomposed=run.variant.plan.recomposed,
    )


def _values(run: PairedRun) -> dict[str, ComparedNode]:
    """Compute the deviation of each node's values, by name. Keeps no reference to the values."""
    planned = {node.name: node for node in run.variant.plan.nodes}
    nodes: dict[str, ComparedNode] = {}
    inherited: dict[fx.Node, float] = {}
    for step in run.steps():
        reads = max((inherited.get(read, 0.0) for read in step.node.all_input_nodes), default=0.0)
        node = _compared(step, planned.get(step.name), reads)
        inherited[step.node] = node.severity if node is not None else reads
        if node is not None:
            nodes[node.name] = node
    return nodes


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
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    renamed = [replace(p, name=first[id(tensors[p.name])]) if p.name in tensors else p for p in parameters]
    places = {name: place for place, name in enumerate(tensors)}
    return tuple(sorted(renamed, key=lambda parameter: places.get(parameter.name, len(places))))
