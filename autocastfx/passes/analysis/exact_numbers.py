"""Numbers that are written in a graph and that 16 bits cannot hold: too large, or rounded to 0 or 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.names import op_name
from autocastfx.graph.node import constants, uses
from autocastfx.plan.plan import Decision, Forced
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.rule import Category

__all__ = ["forced_by_number"]


def forced_by_number(
    node: fx.Node, low: torch.dtype, held: Mapping[str, float], facts: KernelFacts, device: str
) -> Decision | None:
    """The decision on a node whose number is beyond the range of ``low``, or rounded to 0 or 1; None for others.

    Args:
        node: with abstract values.
        low: the 16-bit dtype.
        held: constants and buffers of one element, by ``get_attr`` target.
        facts: the ops whose kernels compute in float32 inside, which round no small number.
        device: device type that the node will run on.
    """
    info, name_of_low = torch.finfo(low), dtype_name(low)
    inside = facts.keeps_numbers(op_name(node), device)
    for name, number in _numbers(node, held):
        size = abs(number)
        if math.isfinite(size) and size > info.max:
            return Decision(Category.DENY, f"{name}={number:g} is beyond {name_of_low}'s range", Forced.CONSTANT)
        if 0 < size < info.tiny and not inside:
            reason = f"{name}={number:g} is below {name_of_low}'s smallest normal value"
            return Decision(Category.DENY, reason, Forced.EPSILON)
        if not inside and _becomes_one(number, low):
            reason = f"{name}={number:.9g} is rounded to {math.copysign(1, number):g} in {name_of_low}"
            return Decision(Category.DENY, reason, Forced.EPSILON)
    return None


def _numbers(node: fx.Node, held: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The numbers written into a node, and those that it reads from a constant of one element."""
    yield from constants(node)
    for use in uses(node):
        if use.node.op == "get_attr" and str(use.node.target) in held:
            yield str(use.node.target), held[str(use.node.target)]


def _becomes_one(number: float, low: torch.dtype) -> bool:
    """True for a number that is ±1 once it is rounded to ``low``: a bound, or a decay, that is none then."""
    return (
        abs(number) != 1
        and abs(abs(number) - 1) <= torch.finfo(low).eps / 2
        and float(torch.tensor(abs(number), dtype=low)) == 1
    )
