"""Say a measured placement as rules of an op list: by module path and op, with ``*`` for layers that agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autocastfx.graph.names import base_name
from autocastfx.plan.plan import Plan, PlannedNode, Precision
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category

__all__ = ["Group", "group_of", "rules_for"]

Group = tuple[str, str]  # a module path and an op
_SIDES = {Precision.LOW: "low", Precision.FLOAT32: "float32"}
_MOST_ROUNDS = 8


def rules_for(
    wanted: Plan, start: Plan, convert: Callable[[OpList], Plan], sensitivity: Sensitivity, name: str = "tuned"
) -> tuple[OpList, Plan]:
    """Find rules by which a conversion places what it computes as ``wanted`` does.

    A rule is added for each module and op that is placed otherwise without it. What one rule draws along may need
    another, so this is repeated until no rule is left to add.

    Args:
        wanted: the plan to say. Nodes of one module and op run in one precision.
        start: the plan that follows from the base list alone.
        convert: gives the plan that follows from rules laid over the base list.
        sensitivity: for the reasons.
        name: of the list, in plans.

    Returns:
        The rules, and the plan that follows from them.
    """
    sides = _sides(wanted)
    chosen: dict[Group, str] = {}
    rules, plan, views = OpList(name=name), start, _views(wanted)
    for _ in range(_MOST_ROUNDS):
        groups = [group for group in _differing(plan, wanted) if group not in chosen and group in sides]
        missing = [group for group in groups if group not in views]
        if not missing and not _is_alike(plan, wanted):
            missing = groups
        if not missing:
            break
        chosen |= {group: sides[group] for group in missing}
        rules = OpList.of({"modules": list(_written(chosen, sides, _Reasons(wanted, sensitivity)))}, name=name)
        plan = convert(rules)
    return rules, plan


def _is_alike(plan: Plan, wanted: Plan) -> bool:
    """True if views alone differ, in a way that costs nothing."""
    error, other = plan.error or 0.0, wanted.error or 0.0
    return plan.traffic.moved <= wanted.traffic.moved and error <= 1.01 * other


def _views(plan: Plan) -> set[Group]:
    return {group_of(node) for node in plan.nodes if node.decision.category is Category.CLEAR}


def _computes(node: PlannedNode) -> bool:
    return node.placement.run in _SIDES and node.op != "getitem"


def group_of(node: PlannedNode) -> Group:
    """Return the module and the op by which a rule names a node."""
    return node.module, base_name(node.op)


def _sides(plan: Plan) -> dict[Group, str]:
    """The precision of each module and op; those that run in both are left out."""
    found: dict[Group, set[str]] = {}
    for node in filter(_computes, plan.nodes):
        found.setdefault(group_of(node), set()).add(_SIDES[node.placement.run])
    return {group: next(iter(sides)) for group, sides in found.items() if len(sides) == 1}


def _differing(plan: Plan, wanted: Plan) -> list[Group]:
    runs = {node.name: node.placement.run for node in wanted.nodes}
    differs = (n for n in plan.nodes if _computes(n) and runs.get(n.name, n.placement.run) is not n.placement.run)
    return list(dict.fromkeys(map(group_of, differs)))


@dataclass(frozen=True)
class _Reasons:
    plan: Plan
    sensitivity: Sensitivity
    by_group: dict[Group, list[PlannedNode]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[Group, list[PlannedNode]] = {}
        for node in filter(_computes, self.plan.nodes):
            found.setdefault(group_of(node), []).append(node)
        object.__setattr__(self, "by_group", found)

    def __call__(self, groups: Sequence[Group], side: str) -> str:
        nodes = [node for group in groups for node in self.by_group.get(group, ())]
        total = f"the {self.sensitivity.of}'s error of {self.plan.error or 0.0:.1e}"
        if side == "low":
            error = _together(node.error or 0.0 for node in nodes)
            return f"tuned: adds {error:.1e} to {total}"
        names = {effect.name for effect in self.sensitivity.effects}
        error = _together(self.sensitivity[node.name].error for node in nodes if node.name in names)
        return f"tuned: in 16 bits it would add {error:.1e} to {total}" if error else "tuned"


def _together(errors: Iterable[float]) -> float:
    return sum(error * error for error in errors) ** 0.5


def _written(chosen: Mapping[Group, str], sides: Mapping[Group, str], reasons: _Reasons) -> Iterable[dict[str, Any]]:
    """The rules as the data of a list: first those for layers that agree, then the others."""
    families: dict[Group, list[Group]] = {}
    for module, op in sides:
        families.setdefault((_layered(module), op), []).append((module, op))
    rules: dict[tuple[str, str], list[tuple[str, list[Group]]]] = {}
    for (path, op), members in families.items():
        asked = [group for group in members if group in chosen]
        agree = len({sides[group] for group in members}) == 1
        if not asked:
            continue
        if agree and len(asked) > 1:
            rules.setdefault((path, sides[asked[0]]), []).append((op, members))
        else:
            for group in asked:
                rules.setdefault((group[0], sides[group]), []).append((op, [group]))
    for (path, side), found in rules.items():
        reason = reasons([group for _, groups in found for group in groups], side)
        yield {"path": path or "re:^$", "category": side, "reason": reason, "ops": sorted({op for op, _ in found})}


def _layered(path: str) -> str:
    """The path with ``*`` for numbers: ``h.*.attn`` for ``h.3.attn``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
