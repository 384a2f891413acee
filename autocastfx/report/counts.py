"""Count the nodes and casts of a graph by op and by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from autocastfx.plan.plan import PlannedNode, Precision, joint_error
from autocastfx.report.columns import Column, aligned, wrapped
from autocastfx.report.folded_casts import FoldedCasts
from autocastfx.report.predicted_error import error_cell
from autocastfx.report.row import Row

__all__ = ["counted"]

_MODULES_LEGEND = (
    "modules whose paths differ in numbers alone, and whose counts are equal, are one line: the counts of each"
)
_ERROR_LEGEND = (
    "error: what the 16 bits of a module's own nodes are predicted to change together; in a line of several, the most"
)
_KINDS = ("op", "output")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def counted(rows: Iterable[Row], casts: Mapping[str, FoldedCasts], width: int | None) -> list[list[str]]:
    """Return the lines of two tables: nodes and casts by op, the most frequent first, and by module, in graph order.

    A cast counts where it is read first; nodes count for the module that they run in, not for those around it.

    Args:
        rows: the nodes to count.
        casts: the casts that they read, by the names of rows.
        width: of a line.
    """
    by_op, by_module = dict[str, Counter[str]](), dict[str, Counter[str]]()
    nodes = dict[str, list[PlannedNode]]()
    for row in (row for row in rows if row.kind in _KINDS):
        first = casts[row.name].first if row.name in casts else 0
        counts = Counter({"nodes": 1, str(row.precision): 1} if row.kind == "op" else {}) + Counter({"casts": first})
        if counts:
            module = (row.planned.module if row.planned is not None else "") or "(root)"
            by_op.setdefault(row.op or row.kind, Counter()).update(counts)
            by_module.setdefault(module, Counter()).update(counts)
            nodes.setdefault(module, []).extend([row.planned] if row.planned is not None else [])
    shown = [str(p) for p in Precision if any(counts[str(p)] for counts in by_op.values())]
    titles = ["nodes", *shown, "casts"]
    ops = [(op, _numbers(by_op[op], titles)) for op in sorted(by_op, key=lambda op: (-by_op[op]["nodes"], op))]
    modules = [
        (path, (f"{len(paths):>7}", *numbers, _largest_error(nodes[one] for one in paths)))
        for path, paths, numbers in _alike(by_module, titles)
    ]
    legend = wrapped(_MODULES_LEGEND, width, "  ") if any("*" in path for path, _ in modules) else []
    legend += wrapped(_ERROR_LEGEND, width, "  ") if any(cells[-1] for _, cells in modules) else []
    return [
        _table("op", titles, ops, width),
        [*_table("module", ["modules", *titles, "error"], modules, width), *legend],
    ]


def _table(
    first: str, titles: Sequence[str], lines: Iterable[tuple[str, tuple[str, ...]]], width: int | None
) -> list[str]:
    return aligned([Column(first), *map(Column, titles)], [(name, *numbers) for name, numbers in lines], width)


def _numbers(counts: Counter[str], titles: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{counts[title]:>{len(title)}}" for title in titles)


def _largest_error(modules: Iterable[Sequence[PlannedNode]]) -> str:
    errors = [error for nodes in modules if (error := joint_error(nodes)) is not None]
    return error_cell(max(errors, default=None))


def _alike(
    by_module: Mapping[str, Counter[str]], titles: Sequence[str]
) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Return path, modules and counts of each group of modules that differ in numbers alone."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, counts in by_module.items():
        groups.setdefault((_NUMBER.sub("*", path), _numbers(counts, titles)), []).append(path)
    return [(pattern if len(paths) > 1 else paths[0], paths, numbers) for (pattern, numbers), paths in groups.items()]
