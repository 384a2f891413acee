"""Compare op lists subject by subject, and write them as YAML that reads back equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from autocastfx.policy.rule import ANY_REDUCTION, Condition, Demand, DepthLimit, Rule, Runs
from autocastfx.policy.saved import Keep

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
    """Return all differences of settings and reasons by subject, sorted. Reasons are shown only if nothing else
    differs.
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


def entries(rules: Iterable[Rule[Any]]) -> list[dict[str, Any]]:
    """Return the entries of rules under one key, in the order of their ranks.

    Rules that differ in device alone share an entry, and so do rules outside of modules that differ in op alone.
    """
    devices: dict[tuple[Rule[Any], bool], list[str]] = {}
    for rule in rules:
        devices.setdefault((replace(rule, device=""), rule.shipped), []).append(rule.device)
    ops: dict[tuple[Rule[Any], bool, tuple[str, ...]], list[str]] = {}
    for (rule, shipped), listed in devices.items():
        named = tuple(sorted(d for d in listed if d))
        for on in [*([()] if "" in listed else []), *([named] if named else [])]:  # no device stands for every one
            alike = rule if rule.path or not rule.ops else replace(rule, ops=("",))
            ops.setdefault((alike, shipped, on), []).extend(rule.ops)
    return [
        {
            **({"path": rule.path} if rule.path else {}),
            **_said(rule),
            **_unless_empty(reason=rule.reason, when=_when(rule.when), devices=list(on), ops=sorted(names)),
            **_unless_empty(rank=0 if isinstance(rule.effect, Keep) else rule.rank, shipped=shipped),
        }
        for (rule, shipped, on), names in sorted(ops.items(), key=_order)
    ]


def _order(entry: tuple[tuple[Rule[Any], bool, tuple[str, ...]], list[str]]) -> tuple[object, ...]:
    (rule, shipped, on), names = entry
    return rule.rank, rule.path, rule.reason, rule.wanted, str(rule.when), shipped, on, names


def _said(rule: Rule[Any]) -> dict[str, Any]:
    """Return the keys of an entry that say the effect of a rule."""
    match rule.effect:
        case Runs(word):
            return {"category": word} if rule.path else {}
        case Keep():
            return {"keep": rule.effect.value}
        case Demand():
            return {key: list(v) if isinstance(v, tuple) else v for key, v in vars(rule.effect).items() if v}
        case _:
            given = {**rule.effect.given}
            if "products" in given:
                given["products"] = [product.value for product in given["products"]]
            if "least" in given:
                given["least"] = dict(given["least"])
            return {"float8": False if given == {"products": []} else given} if rule.path else given


def _when(conditions: tuple[Condition, ...]) -> dict[str, Any]:
    return {c.argument: c.values[0] if len(c.values) == 1 else list(c.values) for c in conditions}


def _unless_empty(**entries: Any) -> Mapping[str, Any]:
    return {key: value for key, value in entries.items() if value}


def limits(listed: Mapping[str, DepthLimit]) -> dict[str, int | None] | int | None:
    """Return the value of ``reduction_depth``: a number alone if the only limit is for all reductions."""
    depths = {op: depth.most for op, depth in sorted(listed.items())}
    return depths.pop(ANY_REDUCTION) if set(depths) == {ANY_REDUCTION} else depths
