"""Write the rows of ``benchmarks.gpu`` as Markdown tables.

python -m benchmarks.gpu.table DIR [DIR ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows as stored
from benchmarks.gpu.stage import Row

__all__ = ["caption", "markdown"]

BYTES = ("peak", "held", "before", "kept")
SAID = {"torch": "torch", "triton": "triton", "transformers": "transformers", "python": "Python", "commit": "commit"}
ENVIRONMENT = "environment"


def markdown(rows: Iterable[Row]) -> str:
    """Return a caption, a table for each kind of row, and what was not measured.

    Stages are of one kind if their names are the same up to a comma.
    """
    found: dict[tuple[str, frozenset[str]], list[Row]] = {}
    missing: list[str] = []
    held = list(rows)
    for row in held:
        if why := row.get("error") or row.get("skipped"):
            named = (f"{row['stage']} ({row['call']})", *(row[key] for key in stored.KEY[2:] if row.get(key)))
            missing.append(f"- {', '.join(dict.fromkeys(named))}: {why}")
        elif "done" not in row and row["stage"] != ENVIRONMENT:
            found.setdefault((row["stage"].partition(",")[0], frozenset(row)), []).append(row)
    parts = [caption(held)]
    parts += [f"{stage[0].upper()}{stage[1:]}:\n\n{_table(same)}" for (stage, _), same in found.items()]
    return "\n\n".join([*parts, *(["Not measured:\n\n" + "\n".join(missing)] if missing else [])]) + "\n"


def caption(rows: Iterable[Row]) -> str:
    """Return a line for each environment: device, versions, commit and date."""
    lines: dict[str, None] = {}
    for row in rows:
        if row["stage"] == ENVIRONMENT and "device" in row:
            versions = ", ".join(f"{name} {row[key]}" for key, name in SAID.items() if row.get(key))
            lines[f"{row['device']}; {versions}; {str(row['date']).partition(' ')[0]}."] = None
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> str:
    names = [key for key in dict.fromkeys((*stored.KEY[2:], *rows[0])) if key not in stored.KEY[:2]]
    names = [name for name in names if any(_cell(name, row.get(name, "")) for row in rows)]
    lines = [[name.replace("_", " ") + (" GB" if name in BYTES else "") for name in names], ["---"] * len(names)]
    lines += [[_cell(name, row.get(name, "")) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in BYTES:
        return f"{value / 1e9:.3f}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) == 3 and all(isinstance(one, float) for one in value):
        return f"{value[1]:.3f} ({value[0]:.3f} to {value[2]:.3f})"  # quartiles
    if isinstance(value, list):
        return ", ".join(_cell("", one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell('', one)}" for key, one in value.items())
    return str(value).replace("|", "\\|").replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of the rows in some folders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.table", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        found = [row for folder in options.folders for row in stored.read(folder)]
    except ValueError as error:
        parser.error(str(error))
    print(markdown(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
