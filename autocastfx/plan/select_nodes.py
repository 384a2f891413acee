"""Select nodes of a plan by name: a node, an op, a module, or an op inside a module."""

from __future__ import annotations

from fnmatch import fnmatchcase

from autocastfx.plan.plan import Plan, PlannedNode
from autocastfx.policy.yaml_tree import nearest

__all__ = ["select"]


def select(plan: Plan, what: str) -> tuple[PlannedNode, ...]:
    """Return the nodes that ``what`` names, in the order of the plan.

    Args:
        plan: the plan of one graph.
        what: a node (``softmax_3``), an op (``softmax``), the path of a module (``layers.0.attn``), or an op
            inside a module (``layers.0.attn.softmax``). Paths may be patterns (``layers.*.attn``).

    Raises:
        KeyError: nothing has this name; the message suggests the nearest.
    """
    named = [node for node in plan.nodes if what in (node.name, node.op)]
    module, _, op = what.rpartition(".")
    named = named or [node for node in plan.nodes if node.op == op and _is_inside(node.module, module)]
    named = named or [node for node in plan.nodes if _is_inside(node.module, what)]
    if not named:
        names = {name for node in plan.nodes for name in (node.name, node.op, node.module, f"{node.module}.{node.op}")}
        raise KeyError(f"no node, op or module of the plan is called {what!r}{nearest(what, names)}")
    return tuple(named)


def _is_inside(module: str, pattern: str) -> bool:
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
