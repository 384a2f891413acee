"""Op lists as text: the YAML that reads back equal, and the lines in which two lists differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from autocastfx.policy.read_rules import UNLISTED
from autocastfx.policy.rule import ANY_REDUCTION, Category, Condition, Demand, DepthLimit, ModuleRule, Rule

if TYPE_CHECKING:
    from autocastfx.policy.op_list import OpList

__all__ = ["Change", "diff", "text"]


@dataclass(frozen=True, order=True)
class Change:
    """One thing of which two lists say different things; an empty text stands for nothing said."""

    subject: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.before or 'nothing'} → {self.after or 'nothing'}"


def diff(first: OpList, second: OpList) -> tuple[Change, ...]:
    """Every difference between two lists, sorted; reasons are shown only where nothing else differs."""
    before, after = _said(first), _said(second)
    changes: list[Change] = []
    for subject in sorted({*before, *after}):
        was, now = before.get(subject, ("", "")), after.get(subject, ("", ""))
        if was[0] != now[0]:
            changes.append(Change(subject, was[0], now[0]))
        elif was != now:
            old, new = (f"{word} ({reason or 'no reason given'})" for word, reason in (was, now))
            changes.append(Change(subject, old, new))
    return tuple(changes)


def _said(op_list: OpList) -> dict[str, tuple[str, str]]:
    """What a list says of each subject, and why."""
    said: dict[str, tuple[str, str]] = {}
    for rule in op_list.every_rule():
        word = str(rule.category) if isinstance(rule, Rule) else _ranked(rule)
        said[rule.subject] = (word, rule.reason)
    said.update({f"keep_args of {op}": (", ".join(names), "") for op, names in op_list.keep_args.items()})
    said.update({f"alias {further}": (listed, "") for further, listed in op_list.aliases.items()})
    said.update({f"set_dtype of {op}": ("float32", "") for op in op_list.set_dtype})
    said.update({f"reduction_depth of {op}": (_limit(d), "") for op, d in op_list.reduction_depth.items()})
    said.update({f"demand of {op}": (_demanded(d), d.reason) for op, d in op_list.demands.items()})
    said["product_depth"] = (_limit(op_list.product_depth) if op_list.product_depth else "", "")
    said["unlisted"] = (_unlisted(op_list), "")
    said["placement"] = (op_list.placement or "", "")
    return said


def _limit(depth: DepthLimit) -> str:
    return "no limit" if depth.most is None else str(depth.most)


def _demanded(demand: Demand) -> str:
    where = f" for {', '.join(demand.arguments)}" if demand.arguments else ""
    of = f" of {', '.join(demand.of)}" if demand.of else ""
    return f"through {demand.through}{where}{of}" + (f" at {', '.join(demand.at)}" if demand.at else "")


def _ranked(rule: ModuleRule) -> str:
    return f"{rule.wanted} at rank {rule.rank}" if rule.rank else rule.wanted


def _unlisted(op_list: OpList) -> str:
    return next((word for word, category in UNLISTED.items() if category is op_list.unlisted), "")


def text(op_list: OpList) -> str:
    """The YAML of a list, grouped by category, reason, conditions and devices."""
    data: dict[str, Any] = {}
    if op_list.unlisted is not None:
        data["unlisted"] = _unlisted(op_list)
    if op_list.placement is not None:
        data["placement"] = op_list.placement
    rules = (*op_list.rules.values(), *op_list.conditional.values())
    for category in Category:
        if groups := _groups(rule for rule in rules if rule.category is category):
            data[category.value] = groups
    if op_list.modules:
        data["modules"] = _modules(op_list.modules)
    if op_list.keep_args:
        data["keep_args"] = {op: list(names) for op, names in sorted(op_list.keep_args.items())}
    if op_list.set_dtype:
        data["set_dtype"] = sorted(op_list.set_dtype)
    if op_list.reduction_depth:
        limits = {op: depth.most for op, depth in sorted(op_list.reduction_depth.items())}
        data["reduction_depth"] = limits.pop(ANY_REDUCTION) if set(limits) == {ANY_REDUCTION} else limits
    if op_list.product_depth is not None:
        data["product_depth"] = op_list.product_depth.most
    if op_list.demands:
        data["demands"] = _demands(op_list.demands.values())
    if op_list.aliases:
        data["aliases"] = dict(sorted(op_list.aliases.items()))
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=118, default_flow_style=None, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes a repeated list out again; a mark and a reference to it read badly."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _groups(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    devices: dict[tuple[str, tuple[Condition, ...], str], list[str]] = {}
    for rule in rules:
        devices.setdefault((rule.reason, rule.when, rule.op), []).append(rule.device)
    ops: dict[tuple[str, tuple[Condition, ...], tuple[str, ...]], list[str]] = {}
    for (reason, when, op), listed in devices.items():
        for on in _apart(listed):
            ops.setdefault((reason, when, on), []).append(op)
    return [
        {
            **_unless_empty(reason=reason, when=_when(when), devices=list(on)),
            "ops": sorted(names),
        }
        for (reason, when, on), names in sorted(ops.items(), key=lambda item: (str(item[0]), item[1]))
    ]


def _apart(devices: Iterable[str]) -> list[tuple[str, ...]]:
    """Device types as groups that one entry can name: no list at all stands for every device."""
    named = tuple(sorted(d for d in devices if d))
    return [*([()] if "" in devices else []), *([named] if named else [])]


def _when(conditions: tuple[Condition, ...]) -> dict[str, Any]:
    return {c.argument: c.values[0] if len(c.values) == 1 else list(c.values) for c in conditions}


def _modules(rules: Iterable[ModuleRule]) -> list[dict[str, Any]]:
    devices: dict[tuple[int, str, tuple[str, ...], str, str], list[str]] = {}
    for rule in rules:
        devices.setdefault((rule.rank, rule.path, rule.ops, rule.wanted, rule.reason), []).append(rule.device)
    return [
        {
            "path": path,
            "category": wanted,
            **_unless_empty(reason=reason, ops=list(ops), devices=list(on), rank=rank),
        }
        for (rank, path, ops, wanted, reason), listed in sorted(devices.items())
        for on in _apart(listed)
    ]


def _demands(demands: Iterable[Demand]) -> list[dict[str, Any]]:
    ops: dict[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for demand in demands:
        ops.setdefault((demand.reason, demand.through, demand.arguments, demand.of, demand.at), []).append(demand.op)
    return [
        {
            **_unless_empty(reason=reason, through=through, arguments=list(arguments), of=list(of), at=list(at)),
            "ops": sorted(names),
        }
        for (reason, through, arguments, of, at), names in sorted(ops.items())
    ]


def _unless_empty(**entries: Any) -> Mapping[str, Any]:
    return {key: value for key, value in entries.items() if value}
