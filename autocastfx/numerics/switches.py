"""Ops whose gradient switches: a change before a ReLU moves some of its inputs past zero, which no derivative shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from autocastfx.graph.names import base_name, op_name
from autocastfx.numerics.paired_run import floating, run_side_by_side
from autocastfx.numerics.replay import Replay
from autocastfx.numerics.segment_run import Read
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["errors_at", "jumps", "least_error"]

# Inputs are moved farther than rounding moves them, so that enough of them switch to tell how much it matters. How many
# switch is proportional to how far they are moved.
_FARTHER = 8.0
_MASK = 1000.0  # times a usual value


def errors_at(ops: Set[str], amp_model: AmpModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much each node of ``ops`` gives other values converted than in float32: the root mean square.

    Zeros are left out, which a ReLU gives for all that is below, and so are masks.

    Args:
        ops: names of ops.
        amp_model: converted.
        args: of the call, by position.
        kwargs: of the call, by keyword.
    """
    if not any(base_name(node.op) in ops for variant in amp_model.variants for node in variant.plan.nodes):
        return {}
    found: dict[str, float] = {}
    for step in run_side_by_side(None, amp_model, args, kwargs).steps():
        ours, full = floating(step.value), floating(step.reference)
        if step.twin is None or base_name(op_name(step.twin)) not in ops or not (ours and full):
            continue
        exact = full[0].float()
        found[step.name] = _rms((ours[0].float() - exact)[_is_counted(exact.abs())])
    return found


def least_error(value: torch.Tensor, low: torch.dtype) -> float:
    """Return the least root mean square that rounding ``value`` to ``low`` has, zeros and masks left out."""
    relative = torch.finfo(low).eps / math.sqrt(48)  # just below a power of two
    return relative * _rms(value[_is_counted(value.abs())])


def _rms(values: torch.Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0


def _is_counted(sizes: torch.Tensor) -> torch.Tensor:
    """True for the values that are neither 0 nor as large as masks are, which may be more than half of all."""
    some = sizes[sizes > 0]
    usual = float(some.kthvalue(len(some) // 4 + 1).values) if len(some) else 0.0
    return (sizes > 0) & (sizes <= _MASK * usual)


def jumps(
    replay: Replay,
    node: fx.Node,
    values: Callable[[fx.Node], Any],
    reads: Sequence[Read],
    gradients: Sequence[torch.Tensor | None],
    error: float,
) -> dict[int, torch.Tensor]:
    """Return by how much the gradients by what ``node`` reads switch, for each unit of error there.

    Random changes of size ``error`` of what it reads make the gradients of some elements jump. These jumps, over
    ``error``, tell what another change does: times that, and added up with random signs, they have the mean square of
    its share in the jumps, if all changes together have the size ``error``.

    Args:
        replay: runs the node.
        node: one whose gradient switches.
        values: what a node gave in float32.
        reads: its float32 reads, in order.
        gradients: the gradient by each float32 tensor that it gives.
        error: the root mean square of the changes.

    Returns:
        By the place of a read, in bfloat16.
    """
    inputs = {read.use: values(read.use.node).detach() for read in reads}
    before = replay.gradients(node, values, inputs, gradients)
    found: dict[int, torch.Tensor] = {}
    for read in reads:
        given = inputs[read.use]
        noise = torch.randn(given.shape, generator=torch.Generator().manual_seed(read.place)).to(given.device)
        moved = {**inputs, read.use: given + noise * (error * _FARTHER)}
        here, there = before[read.place], replay.gradients(node, values, moved, gradients)[read.place]
        if here is not None and there is not None:
            found[read.place] = ((there - here) / (error * math.sqrt(_FARTHER))).to(torch.bfloat16)
    return found
