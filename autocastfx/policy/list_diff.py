"""The lines in which two op lists differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Change", "changes"]


@dataclass(frozen=True, order=True)
class Change:
    """One thing of which two lists say different things; an empty text stands for nothing said."""

    subject: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.before or 'nothing'} → {self.after or 'nothing'}"


def changes(before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]) -> tuple[Change, ...]:
    """Every difference, sorted; reasons are shown only where nothing else differs.

    Args:
        before: by subject, what the first list says of it, and why.
        after: the same of the second.
    """
    found: list[Change] = []
    for subject in sorted({*before, *after}):
        was, now = before.get(subject, ("", "")), after.get(subject, ("", ""))
        if was[0] != now[0]:
            found.append(Change(subject, was[0], now[0]))
        elif was != now:
            old, new = (f"{word} ({reason or 'no reason given'})" for word, reason in (was, now))
            found.append(Change(subject, old, new))
    return tuple(found)
