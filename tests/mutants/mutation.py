"""A mutant: a source text with one small semantic change; and all that there are of a text."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.mutants.changes import changes


@dataclass(frozen=True)
class Mutation:
    """A change of one place.

    Attributes:
        line: its number.
        text: of that line.
        kind: what sort of change it is.
        before, after: the code that changes, in one line.
        start, end: of that code, in bytes.
    """

    line: int
    text: str
    kind: str
    before: str
    after: str
    start: int
    end: int

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutations(source: bytes) -> list[Mutation]:
    """Every mutation of ``source``, in its order."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, after in changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = " ".join(source[start:end].decode().split())
        text = lines[node.lineno - 1].decode().strip()
        found.append(Mutation(node.lineno, text, kind, before, after, start, end))
    return sorted(found, key=lambda one: (one.start, one.kind, one.after))
