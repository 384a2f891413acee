"""The decision that an op list alone gives a node, and the error of an op that it bans."""

from __future__ import annotations

from torch import fx

from autocastfx.errors import BannedOpError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import module_path
from autocastfx.plan.plan import NO_SOURCE, UNLISTED, Decision
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category, ModuleRule, Rule

__all__ = ["listed", "refuse_banned"]


def listed(op_list: OpList, rule: Rule | ModuleRule | None) -> Decision:
    """The decision of ``rule``; of an op without one, as the list says of unlisted ops."""
    if rule is None:
        return Decision(op_list.unlisted or Category.KEEP, "in no list", UNLISTED)
    return Decision(rule.category, rule.reason, rule.source or NO_SOURCE)


def refuse_banned(node: fx.Node, decision: Decision) -> None:
    """Refuse a node that the list bans.

    Raises:
        BannedOpError: it does.
    """
    if decision.category is Category.BAN:
        raise BannedOpError(
            f"node {node.name!r} in module {module_path(node) or '(root)'!r} is {op_name(node)}, which "
            f"{decision.source} bans: {decision.reason or 'no reason given'}. Replace the op in the model, or list it "
            "in another category."
        )
