"""Compare op lists subject by subject, and write them as YAML that reads back equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autocastfx.policy.float8 import Float8Rule
from autocastfx.policy.rule import ANY_REDUCTION, Condition, Demand, DepthLimit, ModuleRule, Rule

# Compare two op lists subject by subject.


@dataclass(frozen=True, order=True)
class Change:
    """A subject that two lists treat differently. An empty text: the list does not mention it."""

    subject: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.before or 'nothing'} → {self.after or 'nothing'}"


def changes(before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]) -> tuple[Change, ...]:
    """Return all differences, sorted by subject. Reasons are shown only if nothing else differs.

    Args:
        before: the first list's setting and reason, by subject.
        after: the second list's.
    """
    differences: list[Change] = []
    for subject in sorted({*before, *after}):
        was, now = before.get(subject, ("", "")), after.get(subject, ("", ""))
        if was[0] != now[0]:
            differences.append(Change(subject, was[0], now[0]))
        elif was != now:
            old, new = (f"{word} ({reason or 'no reason given'})" for word, reason in (was, now))
            differences.append(Change(subject, old, new))
    return tuple(differences)


# Write op lists as YAML that reads back equal.


def text(data: Mapping[str, Any]) -> str:
    """Write a list's keys as YAML, in their order."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, width=118, default_flow_style=None, allow_unicode=True
    )


class _Dumper(yaml.SafeDumper):
    """Writes repeated lists out in full, without YAML anchors, which are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def groups(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """Return the entries under one category, grouped by reason, conditions and devices."""
    devices: dict[tuple[str, tuple[Condition, ...], bool, str], list[str]] = {}
    for rule in rules:
        devices.setdefault((rule.reason, rule.when, rule.shipped, rule.op), []).append(rule.device)
    ops: dict[tuple[str, tuple[Condition, ...], bool, tuple[str, ...]], list[str]] = {}
    for (reason, when, shipped, op), listed in devices.items():
        for on in _apart(listed):
            ops.setdefault((reason, when, shipped, on), []).append(op)
    return [
        {
            **_unless_empty(reason=reason, when=_when(when), devices=list(on)),
            "ops": sorted(names),
            **_unless_empty(shipped=shipped),
        }
        for (reason, when, shipped, on), names in sorted(ops.items(), key=lambda item: (str(item[0]), item[1]))
    ]


def _apart(devices: Iterable[str]) -> list[tuple[str, ...]]:
    """Split device types into groups that one entry each can name; an empty group stands for every device."""
    named = tuple(sorted(d for d in devices if d))
    return [*([()] if "" in devices else []), *([named] if named else [])]


def _when(conditions: tuple[Condition, ...]) -> dict[str, Any]:
    return {c.argument: c.values[0] if len(c.values) == 1 else list(c.values) for c in conditions}


def modules(rules: Iterable[ModuleRule]) -> list[dict[str, Any]]:
    """Return the entries under ``modules``, in the order of their ranks."""
    devices: dict[tuple[int, str, tuple[str, ...], str, str, bool], list[str]] = {}
    for rule in rules:
        key = rule.rank, rule.path, rule.ops, rule.wanted, rule.reason, rule.shipped
        devices.setdefault(key, []).append(rule.device)
    return [
        {
            "path": path,
            "category": wanted,
            **_unless_empty(reason=reason, ops=list(ops), devices=list(on), rank=rank, shipped=shipped),
        }
        for (rank, path, ops, wanted, reason, shipped), listed in sorted(devices.items())
        for on in _apart(listed)
    ]


def float8(rules: Iterable[Float8Rule]) -> list[dict[str, Any]]:
    """Return the entries under ``float8``: the rules for ops, an entry for each."""
    return [{"ops": [r.op], **_on(r), **_float8(r)} for r in _ranked(rules) if not r.path]


def float8_modules(rules: Iterable[Float8Rule]) -> list[dict[str, Any]]:
    """Return the entries under ``modules`` of the rules for modules, in the order of their ranks."""
    return [
        {
            "path": r.path,
            "float8": _float8(r) if r.products != () or len(_float8(r)) > 1 else False,
            **_unless_empty(ops=[r.op] if r.op else [], rank=r.rank),
            **_on(r),
        }
        for r in _ranked(rules)
        if r.path
    ]


def _ranked(rules: Iterable[Float8Rule]) -> list[Float8Rule]:
    return sorted(rules, key=lambda rule: (rule.rank, rule.key))


def _on(rule: Float8Rule) -> Mapping[str, Any]:
    return _unless_empty(reason=rule.reason, devices=[rule.device] if rule.device else [], shipped=rule.shipped)


def _float8(rule: Float8Rule) -> dict[str, Any]:
    settings = {
        "recipe": rule.recipe,
        "products": None if rule.products is None else [product.value for product in rule.products],
        "least": None if rule.least is None else dict(rule.least),
        "last": rule.last,
        "emulate": rule.emulate,
    }
    return {key: value for key, value in settings.items() if value is not None}


def demands(listed: Iterable[Demand]) -> list[dict[str, Any]]:
    """Return the entries under ``demands``."""
    ops: dict[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], bool], list[str]] = {}
    for one in listed:
        key = one.reason, one.through, one.arguments, one.of, one.at, one.shipped
        ops.setdefault(key, []).append(one.op)
    return [
        {
            **_unless_empty(reason=reason, through=through, arguments=list(arguments), of=list(of), at=list(at)),
            "ops": sorted(names),
            **_unless_empty(shipped=shipped),
        }
        for (reason, through, arguments, of, at, shipped), names in sorted(ops.items())
    ]


def _unless_empty(**entries: Any) -> Mapping[str, Any]:
    return {key: value for key, value in entries.items() if value}


def limits(listed: Mapping[str, DepthLimit]) -> dict[str, int | None] | int | None:
    """Return the value of ``reduction_depth``: a number alone if the only limit is for all reductions."""
    depths = {op: depth.most for op, depth in sorted(listed.items())}
    return depths.pop(ANY_REDUCTION) if set(depths) == {ANY_REDUCTION} else depths
