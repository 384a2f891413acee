"""``compare``: measure the deviation of a converted model from the float32 graph, node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autocastfx.capture.call import CallSignature
from autocastfx.errors import VariantError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import module_path
from autocastfx.numerics.paired_backward import Loss, run_backwards
from autocastfx.numerics.paired_run import PairedRun, Step, floating, run_side_by_side
from autocastfx.plan.plan import PlannedNode
from autocastfx.report.comparison import ComparedNode, ComparedParameter, ComparedVariant, Comparison, Deviation
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["compare"]


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
        raise ValueError("loss and scale are for gradients: give gradients=True as well, or leave them out")
    factor = 1.0 if scale is None else scale
    if not 0 < factor < math.inf:
        raise ValueError(f"scale is a finite number above 0, not {factor}")
    run = run_side_by_side(model, amp_model, inputs, kwargs, gradients=gradients)
    if run.full is None:
        raise VariantError(
            "the float32 graph is not at hand: the model was unpickled, or its weights are stored in 16 bits. Give "
            "compare the float32 model as its first argument."
        )
    nodes = _values(run)
    leaves: list[ComparedParameter] = []
    if gradients:
        for found in run_backwards(run, loss, factor):
            if not found.low:
                continue
            deviation = Deviation.of(found.low, found.full)
            if found.is_leaf:
                leaves.append(ComparedParameter(**vars(deviation), name=found.name))
            elif found.name in nodes:
                nodes[found.name] = replace(nodes[found.name], gradient=deviation)
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


def _named(parameters: list[ComparedParameter], held: Mapping[str, torch.Tensor]) -> tuple[ComparedParameter, ...]:
    """Rename tied parameters to their first name, and sort by the model's order; inputs of the call come last."""
    first: dict[int, str] = {}
    for name, tensor in held.items():
        first.setdefault(id(tensor), name)
    found = [replace(p, name=first[id(held[p.name])]) if p.name in held else p for p in parameters]
    places = {name: place for place, name in enumerate(held)}
    return tuple(sorted(found, key=lambda parameter: places.get(parameter.name, len(places))))
