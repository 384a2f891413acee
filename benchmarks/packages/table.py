"""Write the rows of :mod:`benchmarks.packages` as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.packages.row import VERDICTS, Row

_LONG = 140


def table(rows: Sequence[Row]) -> str:
    """Count the verdicts by package and way, then list what was said, once for both dtypes."""
    header = "".join(f" {verdict:>8}" for verdict in VERDICTS)
    lines = [f"{'package':<28} {'version':<10} {'way':<21}{header}"]
    for package in dict.fromkeys(row.package for row in rows):
        mine = [row for row in rows if row.package == package]
        for way in dict.fromkeys(row.way for row in mine):
            counts = Counter(row.verdict for row in mine if row.way == way)
            lines.append(
                f"{package:<28} {mine[0].version:<10} {way:<21}" + "".join(f" {counts[one]:>8}" for one in VERDICTS)
            )
    counts = Counter(row.verdict for row in rows)
    lines += [f"{'all':<28} {'':<10} {'':<21}" + "".join(f" {counts[one]:>8}" for one in VERDICTS), ""]
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict != "ok":
            said.setdefault(f"{row.package}, {row.case}, {row.way}: {row.verdict}: {row.reason[:_LONG]}", []).append(
                row.dtype
            )
    return "\n".join([*lines, *(f"{what} ({', '.join(dtypes)})" for what, dtypes in said.items())])
