"""The plan's entries of a converted graph: its nodes, the inserted casts, and the reads of working copies."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import dtypes, elements, module_path, origin
from autocastfx.passes.analysis.place_cheaply import CAST
from autocastfx.passes.state import State
from autocastfx.plan.plan import PlannedCast, PlannedCopy, PlannedNode, Precision
from autocastfx.plan.sensitivity import Signature, rms
from autocastfx.runtime.operators.casts import cast_if, saturating_cast
from autocastfx.runtime.working_copies import working_copy

__all__ = ["planned_casts", "planned_copies", "planned_node"]


def planned_node(node: fx.Node, state: State, low: torch.dtype, prefix: str, effect: Signature = ()) -> PlannedNode:
    """The plan's entry of a node of the graph before rewriting; ``effect`` is the one predicted for it."""
    placement, captured = state.placements[node], state.dtypes[node]
    guessed = "?" if node.name in (state.guesses or ()) else ""
    after = tuple(low if placement.store is Precision.LOW and d == torch.float32 else d for d in captured)
    if state.followed is not None:
        after = state.followed.dtypes[node]
    elif state.raised is not None:
        after = state.raised[node]
    return PlannedNode(
        name=prefix + node.name,
        op=state.ops[node],
        module=module_path(node),
        decision=state.classification.decisions[node],
        placement=replace(placement, because=placement.because.inside(prefix)),
        captured=_names(captured) + guessed,
        dtype=_names(after) + guessed,
        error=rms(effect) if effect else None,
        effect=effect,
    )


def planned_casts(graph: fx.Graph, prefix: str) -> list[PlannedCast]:
    """The casts in a rewritten graph."""
    casts = ("to", of_function(cast_if), of_function(saturating_cast))
    made = [(n, mark) for n in graph.nodes if (mark := origin(n)) is not None and op_name(n) in casts]
    return [
        PlannedCast(
            name=prefix + node.name,
            value=prefix + mark.value,
            dtype=_names(dtypes(node)),
            readers=tuple(prefix + reader.name for reader in node.users),
            saturates=mark.saturates,
            bytes=CAST * elements(node, *dtypes(node)),
        )
        for node, mark in made
    ]


def planned_copies(graph: fx.Graph) -> list[PlannedCopy]:
    """The reads of working copies in a rewritten graph."""
    return [
        PlannedCopy(
            name=node.name,
            parameter=str(cast("fx.Node", node.args[1]).target),
            dtype=_names(dtypes(node)),
            readers=tuple(reader.name for reader in node.users),
        )
        for node in graph.nodes
        if node.target is working_copy
    ]


def _names(found: tuple[torch.dtype, ...]) -> str:
    return ",".join(dtype_name(d) for d in found)
