"""What the passes hand on, and what of it goes into the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from autocastfx.graph.magnitude import Magnitude
from autocastfx.graph.node import dtypes, elements, module_path, origin
from autocastfx.graph.op_name import of_function, op_name
from autocastfx.passes.analysis.bytes_moved import CAST
from autocastfx.passes.analysis.held_values import HeldValues
from autocastfx.passes.classify import Classification
from autocastfx.passes.torch_autocast.dispatch import Followed
from autocastfx.plan.plan import Placement, PlannedCast, PlannedCopy, PlannedNode, Precision, Recomposed, Traffic
from autocastfx.runtime.operators.conditional_cast import cast_if
from autocastfx.runtime.operators.saturating_cast import saturating_cast
from autocastfx.runtime.working_copies import working_copy

__all__ = ["State", "planned_casts", "planned_copies", "planned_node"]


@dataclass(frozen=True)
class State:
    """What the passes hand on: a graph on its way, and all that is known of it so far."""

    graph: fx.Graph
    attributes: Mapping[str, Any]
    parameters: frozenset[str]
    values: HeldValues
    dtypes: Mapping[fx.Node, tuple[torch.dtype, ...]]  # before rewriting, as the op names are
    ops: Mapping[fx.Node, str]
    guesses: frozenset[str] | None = None
    measured: Mapping[fx.Node, Magnitude] = field(default_factory=dict)
    classification: Classification = field(default_factory=lambda: Classification({}, frozenset()))
    placements: Mapping[fx.Node, Placement] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    cached: Mapping[str, int] = field(default_factory=dict)  # parameters that are cast once, by a number of each tensor
    numbers: Mapping[str, int] = field(default_factory=dict)  # of all parameters, by name; tied ones share one
    followed: Followed | None = None
    prefix: str = ""
    recomposed: tuple[Recomposed, ...] = ()


def planned_node(node: fx.Node, state: State, low: torch.dtype, prefix: str) -> PlannedNode:
    """The plan's entry of a node of the graph before rewriting."""
    placement, captured = state.placements[node], state.dtypes[node]
    guessed = "?" if node.name in (state.guesses or ()) else ""
    after = tuple(low if placement.store is Precision.LOW and d == torch.float32 else d for d in captured)
    if state.followed is not None:
        after = state.followed.dtypes[node]
    return PlannedNode(
        name=prefix + node.name,
        op=state.ops[node],
        module=module_path(node),
        decision=state.classification.decisions[node],
        placement=placement,
        captured=_names(captured) + guessed,
        dtype=_names(after) + guessed,
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
    return ",".join(str(d).removeprefix("torch.") for d in found)
