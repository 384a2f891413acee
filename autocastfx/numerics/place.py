"""Places that ``bisect`` can run in float32, and the order in which it searches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autocastfx.graph.node import attribute
from autocastfx.graph.walk import walk
from autocastfx.numerics.find_overflow import find_overflow
from autocastfx.numerics.overflow import Overflow
from autocastfx.plan.plan import Plan, PlannedNode, Precision, joint_error
from autocastfx.report.lint.roofline import work_of
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["Place", "places_of", "search_order"]

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, order=True)
class Place:
    """An op inside a module: all its nodes there, which one rule of an op list covers.

    At the root ``module`` is empty; the rule is then one for the op in all modules.
    """

    module: str
    op: str

    def __str__(self) -> str:
        return f"{self.module}.{self.op}" if self.module else self.op


def places_of(plan: Plan) -> tuple[Place, ...]:
    """Return the places whose nodes run in 16 bits, in graph order."""
    low = (node for node in plan.nodes if node.placement.run is Precision.LOW)
    return tuple(dict.fromkeys(Place(node.module, node.op) for node in low))


def search_order(amp_model: AmpModule, places: Sequence[Place], call: Call | None) -> tuple[Place, ...]:
    """Return ``places`` in the order of preference among those that mend a metric alike.

    First come those of the node at which a call overflows; then those of larger predicted errors, where the plan has
    any; then those that move fewer bytes, which float32 doubles; then those that come earlier in the graph.

    Args:
        amp_model: with these places in 16 bits.
        places: of its plan.
        call: positional and keyword arguments; None: no call is looked at.

    Raises:
        NodeError: a node raises in the call.
    """
    found = find_overflow(amp_model, *call[0], **call[1]) if call is not None else None
    faulty = set(_at_fault(found, amp_model.plan)) if found else set[Place]()
    errors, moved = _predicted(amp_model.plan), _bytes_moved(amp_model)
    return tuple(sorted(places, key=lambda p: (p not in faulty, -errors.get(p, 0.0), moved[p])))  # which is stable


def _at_fault(found: Overflow, plan: Plan) -> Iterator[Place]:
    readers = {name for cast in plan.casts if cast.name == found.name for name in cast.readers}
    for node in plan.nodes:
        if node.name == found.name or node.name in readers:
            yield Place(node.module, node.op)


def _predicted(plan: Plan) -> dict[Place, float]:
    """The predicted errors of places; none without a sensitivity."""
    nodes: dict[Place, list[PlannedNode]] = {}
    for node in plan.nodes:
        nodes.setdefault(Place(node.module, node.op), []).append(node)
    return {place: error for place, found in nodes.items() if (error := joint_error(found)) is not None}


def _bytes_moved(amp_model: AmpModule) -> Counter[Place]:
    """The bytes that the nodes of each place read and write; none for a model that was not captured yet."""
    found, plan, graph = Counter[Place](), amp_model.plan, amp_model.graph
    if plan.unverified:
        return found
    places = {node.name: Place(node.module, node.op) for node in plan.nodes}
    held = {str(n.target): attribute(amp_model, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    for one in walk(graph, held):
        if one.name in places:
            found[places[one.name]] += work_of(one.node).bytes
    return found
