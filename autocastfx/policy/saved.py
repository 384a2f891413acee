"""Rules of an op list on what is kept for backward: of the values that an op gives, or the ops in some modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autocastfx.errors import ArgumentError, TextPlace
from autocastfx.policy.rule import ModuleRule, module_pattern
from autocastfx.policy.yaml_tree import Tree


class Keep(str, Enum):
    """The form in which a value is kept for backward, with its word in op lists."""

    COMPUTED = "computed"
    LOW = "low"
    FLOAT8 = "float8"
    RECOMPUTE = "recompute"

    def __str__(self) -> str:
        return self.value

    @property
    def in_words(self) -> str:
        """The form in words."""
        words = {Keep.COMPUTED: "as computed", Keep.LOW: "in bfloat16", Keep.FLOAT8: "in float8"}
        return words.get(self, "recomputed")


KEEPS: Mapping[str, str] = {
    "computed": "kept as it was computed",
    "low": "float32 values are kept in bfloat16, rows far from 0 without their middle; others as computed",
    "float8": "kept in float8 (e4m3), with a float32 scale and a middle for each row in memory",
    "recompute": "not kept where cheap ops give it again, to the bit, from what is kept: the choice that keeps the "
    "fewest bytes",
}
SAVED_KEYS: Mapping[str, str] = {
    "keep": "how the values that these ops give are kept for backward; forward does not change",
    "ops": "these ops; by default all",
    "path": "only inside of these modules, by a pattern as under `modules`; by default everywhere",
    "reason": "text that plans and dumps show",
}
# What convert's ``saved`` stands for.
SAVED: Mapping[str, Keep | None] = {
    "as computed": None,
    **{keep.value: keep for keep in (Keep.RECOMPUTE, Keep.LOW, Keep.FLOAT8)},
}


@dataclass(frozen=True)
class SavedRule:
    """A line of a list on how values are kept for backward. Of those that fit, the last one counts.

    Attributes:
        keep: the form.
        op: the name of the op that gives the values; empty: any.
        path: as in :class:`ModuleRule`; empty: everywhere.
        reason: text that plans and dumps show.
        source: the place of the rule.
    """

    keep: Keep
    op: str = ""
    path: str = ""
    reason: str = ""
    source: TextPlace | None = field(default=None, compare=False)
    shipped: bool = field(default=False, compare=False)

    @property
    def subject(self) -> str:
        """The values that it covers, in words."""
        return f"saved {self.op or 'values'}{f' in {self.path}' if self.path else ''}"

    def covers(self, names: Set[str], paths: Sequence[str]) -> bool:
        """True for an op with these names, in modules with these paths."""
        if self.op and self.op not in names:
            return False
        return not self.path or any(map(ModuleRule(self.path, "keep").covers, paths))


def saved_rules(tree: Tree) -> Iterator[SavedRule]:
    """Yield the rules under ``saved``.

    Raises:
        OpListError: an entry is wrong.
    """
    for entry in tree.child("saved").entries():
        entry.check_keys(tuple(SAVED_KEYS), what="key of an entry under 'saved'")
        if entry.child("keep").is_missing:
            raise entry.error("this entry does not say how values are kept: an entry is {keep: …, ops: […], path: …}")
        keep = Keep(entry.child("keep").one_of(tuple(KEEPS), "keep"))
        path, ops = entry.child("path").as_text(default=""), entry.child("ops")
        if not ops.is_missing and not ops.as_strings():
            raise ops.error("an empty list of ops never matches: leave it out")
        if path:
            try:
                module_pattern(path)
            except ValueError as error:
                raise entry.child("path").error(f"{error}") from None
        for op in ops.as_strings() or (None,):
            name = "" if op is None else op.op_name()
            reason = entry.child("reason").as_text(default="")
            yield SavedRule(keep, name, path, reason, (op or entry).source, entry.shipped)


def written(rules: Iterable[SavedRule]) -> list[dict[str, Any]]:
    """The entries under ``saved``, one for each rule."""
    return [
        {
            "keep": rule.keep.value,
            **({"ops": [rule.op]} if rule.op else {}),
            **({"path": rule.path} if rule.path else {}),
            **({"reason": rule.reason} if rule.reason else {}),
        }
        for rule in rules
    ]


def rules_of(saved: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries that an argument ``saved`` stands for.

    Raises:
        ValueError: it is no word for a form.
    """
    if isinstance(saved, Sequence) and not isinstance(saved, str) and all(isinstance(one, Mapping) for one in saved):
        return list(saved)
    if not isinstance(saved, str) or saved not in SAVED:
        words = ", ".join(map(repr, SAVED))
        raise ArgumentError(
            f"saved is {words}, or a list of entries as under 'saved' of an op list, not {saved!r}; a factor of the "
            "error is for tune"
        )
    keep = SAVED[saved]
    return [] if keep is None else [{"keep": keep.value}]
