"""The part of the page's data that tells how another plan decides: by node, and for the graph."""

from __future__ import annotations

from typing import Any

from autocastfx.plan.plan import Plan, PlannedNode
from autocastfx.plan.plan_diff import PlanDiff, diff

__all__ = ["changed_nodes", "changes_of", "compare_plans"]


def compare_plans(against: Plan, plan: Plan) -> PlanDiff:
    """Compare the plan of a graph with another one.

    Raises:
        ValueError: no node has the same name in both.
    """
    found = diff(against, plan)
    if plan.nodes and len(found.added) == len(plan.nodes):
        raise ValueError(
            "the plan given as against= is of another model or graph: no node of it is in the one shown. Give the plan "
            "of the same model, converted in another way."
        )
    return found


def changes_of(found: PlanDiff) -> dict[str, Any]:
    """Return what differs in words, and the nodes that only the other plan has."""
    removed = [{"name": n.name, "op": n.op, "module": n.module, "decided": str(n.decision)} for n in found.removed]
    return {"summary": found.summary, **({"removed": removed} if removed else {})}


def changed_nodes(found: PlanDiff) -> dict[str, dict[str, Any]]:
    """Return what the other plan says of each node that differs, by name; of a node that it lacks, nothing."""
    changed = {pair.name: {**_said(pair.before), **({"moved": True} if pair.moved else {})} for pair in found.changed}
    return {**changed, **{node.name: {"added": True} for node in found.added}}


def _said(node: PlannedNode) -> dict[str, Any]:
    run, store = node.placement.run, node.placement.store
    runs = str(run) if run is store else f"{run}, stored {store}"
    return {"runs": runs, "because": str(node.placement.because), "decided": str(node.decision)}
