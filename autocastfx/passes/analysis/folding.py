"""Folding: which nodes may yet take and give 16 bits where their list asks for float32. Pure.

A ``deny`` node may, whose kernel computes in float32 inside; and a ``promote`` node that only joins values (a class
token to activations, say): where all its readers are low, it rounds what they would round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autocastfx.graph.alias import aliased
from autocastfx.graph.magnitude import takes_mask
from autocastfx.graph.names import kernel_name
from autocastfx.graph.node import argument, is_float32, tensors, uses
from autocastfx.passes.analysis.ports import Ports
from autocastfx.plan.plan import Decision, Forced
from autocastfx.policy.kernel_facts import PARAMETERS
from autocastfx.policy.rule import Category

__all__ = ["Fold", "Folding"]


@dataclass(frozen=True)
class Fold:
    """The conditions on a node's neighbours under which it folds, beside that all its readers are low.

    Attributes:
        reads: the values that must be low for it to be low. Not what the model holds: a norm that takes no float32
            parameters reads them in 16 bits.
        taints: whether the node, where it is float32 after all, draws what follows it to float32. Not where its result
            may be rounded anyway.
    """

    reads: tuple[fx.Node, ...]
    taints: bool = True


@dataclass(frozen=True)
class Folding:
    """The rules of one conversion.

    Attributes:
        ports: which inputs share a node's precision, and the facts: which ops fold.
        level: ``"none"``, ``"exact"`` or ``"kernel"``.
        low: name of the 16-bit dtype.
    """

    ports: Ports
    level: str
    low: str

    def __call__(
        self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision], wide: frozenset[fx.Node]
    ) -> dict[fx.Node, Fold]:
        """The folds of ``graph``.

        Args:
            graph: captured, with abstract values.
            decisions: one for every computing node.
            wide: values that hold finite numbers beyond the low dtype's range.
        """
        found: dict[fx.Node, Fold] = {}
        for node in reversed(graph.nodes):
            category = decisions[node].category if node in decisions else None
            if category is Category.PROMOTE and self.level == "kernel" and self._joins_what_came_in(node):
                found[node] = Fold((), taints=False)
            elif category is Category.DENY:
                reads = self._reads(node, decisions[node], wide, found)
                if reads:
                    found[node] = Fold(reads, taints=self._may_fold(node, "exact"))
        return found

    def _reads(
        self, node: fx.Node, decision: Decision, wide: frozenset[fx.Node], later: Mapping[fx.Node, Fold]
    ) -> tuple[fx.Node, ...]:
        """Return the values that ``node`` must read in 16 bits to fold; none if it does not fold."""
        given = (u for u in uses(node) if not self.ports.stays_float32(node, u))
        asked = tuple(u for u in given if is_float32(u.node) and any(t.ndim for t in tensors(u.node)))
        if decision.source == Forced.WIDE and self.level == "kernel":
            masks = [u for u in asked if u.node in wide]
            is_masked = all(takes_mask(node, u) for u in masks) and all(reader in later for reader in node.users)
            return tuple(u.node for u in asked if u not in masks) if is_masked else ()
        if isinstance(decision.source, Forced) or argument(node, "dtype") is not None:  # the call asks for float32
            return ()
        return tuple(u.node for u in asked if u.node.op != "get_attr") if self._may_fold(node, self.level) else ()

    def _may_fold(self, node: fx.Node, level: str) -> bool:
        facts, name = self.ports.facts, self.ports.kernel(node)
        if name in facts.folds_with_parameters and not any(u.argument in PARAMETERS for u in uses(node)):
            return False
        return facts.may_fold(name, self.low, self.ports.device, level)

    def _joins_what_came_in(self, node: fx.Node) -> bool:
        """True if ``node`` joins a parameter, an input of the graph, or a view of one: float32 in any case."""
        joins = kernel_name(node) in self.ports.facts.joins
        return joins and any(_came_in(u.node) for u in uses(node) if is_float32(u.node))


def _came_in(value: fx.Node) -> bool:
    return value.op in ("placeholder", "get_attr") or any(_came_in(source) for source in aliased(value))
