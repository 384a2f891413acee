"""Spend the bytes that a plan leaves of a limit: run further ops in float32, first those that add most to its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autocastfx.numerics.tuned_rules import Group, group_of
from autocastfx.plan.plan import Plan, Precision
from autocastfx.plan.sensitivity import Signature, added
from autocastfx.policy.op_list import OpList

__all__ = ["by_share", "filled", "raised"]

_MOST_GROUPS = 16


def filled(rules: OpList, plan: Plan, most: float, convert: Callable[[OpList], Plan]) -> Iterator[Plan]:
    """Yield plans of ever less error, each with one more module's op in float32.

    A minimum cut finds the plans on the convex hull of bytes and error alone, and adds up squared errors as if they
    were independent. Here an op counts by how much the plan's squared error falls without it, other errors included.

    Args:
        rules: laid over the base list.
        plan: the plan that follows from them, with its predicted errors.
        most: the most bytes that a plan may move.
        convert: gives the plan that follows from rules laid over the base list.
    """
    tried: set[Group] = set()
    improved = True
    while improved:
        improved = False
        for group in by_share(plan):
            if group in tried:
                continue
            if len(tried) == _MOST_GROUPS:
                return
            tried.add(group)
            further = rules.merged(raised(group))
            found = convert(further)
            if found.traffic.moved <= most and (found.error or 0.0) < (plan.error or 0.0):
                rules, plan, improved = further, found, True
                yield plan
                break


def by_share(plan: Plan) -> list[Group]:
    """Return the ops of each module that run in 16 bits, by how much the plan's squared error falls without theirs."""
    effects: dict[Group, list[Signature]] = {}
    for node in plan.nodes:
        if node.effect and node.placement.run is Precision.LOW:
            effects.setdefault(group_of(node), []).append(node.effect)
    whole = added(node.effect for node in plan.nodes if node.effect)
    falls = {group: _fall(added(own), whole) for group, own in effects.items()}
    return sorted((group for group, fall in falls.items() if fall > 0), key=lambda group: -falls[group])


def _fall(own: Signature, whole: Signature) -> float:
    return sum(one * (2 * total - one) for one, total in zip(own, whole, strict=True))


def raised(group: Group) -> OpList:
    """Return the rule that runs an op of a module in float32."""
    module, op = group
    return OpList.of({"modules": [{"path": module or "re:^$", "category": "float32", "ops": [op]}]})
