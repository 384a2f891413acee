"""Compare two op lists subject by subject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Change", "changes"]


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
    found: list[Change] = []
    for subject in sorted({*before, *after}):
        was, now = before.get(subject, ("", "")), after.get(subject, ("", ""))
        if was[0] != now[0]:
            found.append(Change(subject, was[0], now[0]))
        elif was != now:
            old, new = (f"{word} ({reason or 'no reason given'})" for word, reason in (was, now))
            found.append(Change(subject, old, new))
    return tuple(found)
