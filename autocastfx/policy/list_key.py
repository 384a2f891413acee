"""Describe a key of op lists: its meaning, and functions to read, merge, write and compare its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autocastfx.policy.rule import ANY_REDUCTION, DepthLimit, ModuleRule
from autocastfx.policy.yaml_tree import Tree

__all__ = ["ListKey", "Said", "join", "keys_of", "later_or_earlier", "limited", "stacked"]

Said = tuple[str, str, str]  # subject, setting, reason


def join(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge two mappings; the later wins."""
    return {**earlier, **later}


def later_or_earlier(earlier: Any, later: Any) -> Any:
    """Return the later value; the earlier one if the later is None."""
    return earlier if later is None else later


def stacked(earlier: tuple[ModuleRule, ...], later: tuple[ModuleRule, ...]) -> tuple[ModuleRule, ...]:
    """Merge two lists' rules: later ones get higher ranks, and replace earlier ones of the same key."""
    replaced = {rule.key for rule in later}
    above = 1 + max((rule.rank for rule in earlier), default=-1)
    raised = (replace(rule, rank=rule.rank + above) for rule in later)
    return (*(rule for rule in earlier if rule.key not in replaced), *raised)


def limited(earlier: Mapping[str, DepthLimit], later: Mapping[str, DepthLimit]) -> Mapping[str, DepthLimit]:
    """Merge two lists' limits; a later limit for all reductions discards the earlier limits of single ops."""
    return {**({} if ANY_REDUCTION in later else earlier), **later}


@dataclass(frozen=True)
class ListKey:
    """A key of an op list: the ``metadata["key"]`` of the list's field of the same name.

    Attributes:
        meaning: the key's line on the reference page, in Markdown.
        read: reads the value from the whole list's tree, in which the key may be missing.
        write: turns the value into data for YAML. Default values are not written.
        said: lists the value's settings as (subject, setting, reason), for comparisons.
        over: merges an earlier list's value with a later one's.
    """

    meaning: str
    read: Callable[[Tree], Any]
    write: Callable[[Any], Any]
    said: Callable[[Any], Iterable[Said]]
    over: Callable[[Any, Any], Any] = join


def keys_of(kind: type[Any]) -> dict[str, ListKey]:
    """Return the fields of ``kind`` that are keys of op lists, in their order."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(kind) if "key" in f.metadata}
