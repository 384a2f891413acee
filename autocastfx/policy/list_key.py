"""A key of an op list: what it means, and how its value is read, laid over an earlier one, written and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autocastfx.policy.rule import ANY_REDUCTION, DepthLimit, ModuleRule
from autocastfx.policy.yaml_tree import Tree

__all__ = ["ListKey", "Said", "join", "keys_of", "later_or_earlier", "limited", "stacked"]

Said = tuple[str, str, str]  # a subject, what is said of it, and why


def join(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both mappings as one, in which the later wins."""
    return {**earlier, **later}


def later_or_earlier(earlier: Any, later: Any) -> Any:
    """The later value, or the earlier one where the later list says nothing."""
    return earlier if later is None else later


def stacked(earlier: tuple[ModuleRule, ...], later: tuple[ModuleRule, ...]) -> tuple[ModuleRule, ...]:
    """The rules of both, the later ones with the higher ranks, and in place of earlier ones of the same key."""
    replaced = {rule.key for rule in later}
    above = 1 + max((rule.rank for rule in earlier), default=-1)
    raised = (replace(rule, rank=rule.rank + above) for rule in later)
    return (*(rule for rule in earlier if rule.key not in replaced), *raised)


def limited(earlier: Mapping[str, DepthLimit], later: Mapping[str, DepthLimit]) -> Mapping[str, DepthLimit]:
    """The limits of both; a later one for all reductions undoes what each op had."""
    return {**({} if ANY_REDUCTION in later else earlier), **later}


@dataclass(frozen=True)
class ListKey:
    """A key of an op list: the ``metadata["key"]`` of the list's field of the same name.

    Attributes:
        meaning: a line of the reference page, in Markdown.
        read: the value, from the whole list's tree, in which the key may be missing.
        write: the value as YAML's data; a value that says nothing is not written.
        said: what the value says of which subjects, and why, for comparisons.
        over: an earlier list's value and a later one's, as one.
    """

    meaning: str
    read: Callable[[Tree], Any]
    write: Callable[[Any], Any]
    said: Callable[[Any], Iterable[Said]]
    over: Callable[[Any, Any], Any] = join


def keys_of(kind: type[Any]) -> dict[str, ListKey]:
    """The keys that are fields of ``kind``, in their order."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(kind) if "key" in f.metadata}
