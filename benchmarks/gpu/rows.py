"""Rows of ``benchmarks.gpu``: JSON objects, one a line, each appended at once. The last row of a key counts.

    python -m benchmarks.gpu.rows DIR [DIR ...]

adds the rows measured in these folders to those in ``benchmarks/results/gpu``, which ``benchmarks.report`` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.stage import Row

NAME = "rows.jsonl"
KEY = ("card", "stage", "model", "side", "dtype")
RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu"


def append(folder: Path, row: Row) -> None:
    """Write ``row`` in one piece, so that processes that write at the same time do not mix.

    A line that was torn before stays a line of its own.
    """
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = b"\n" if size and os.pread(file, 1, size - 1) != b"\n" else b""
        os.write(file, torn + json.dumps(row).encode() + b"\n")
    finally:
        os.close(file)


def read(folder: Path) -> list[Row]:
    """Return the rows in a folder; none if it has no file of rows.

    A line that is no row, as a killed process may leave, is named on stderr and left out.
    """
    path, found = folder / NAME, list[Row]()
    if not path.exists():
        return found
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict) and "stage" in row:
            found.append(row)
        else:
            print(f"{path}:{number}: no row, left out: {line[:60]}", file=sys.stderr)
    return found


def key(row: Row) -> tuple[str, ...]:
    """Return what a row is of: card, stage, model, side and dtype."""
    return tuple(row.get(name, "") for name in KEY)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each key."""
    return list({key(row): row for row in rows}.values())


def ended(rows: Iterable[Row], card: str) -> set[str]:
    """Return the names of the stages that are not to be run again on this card: those done or skipped, without errors.

    A side that fails may take the device along for those that follow it in its process, so it is tried again, too.
    """
    mine = [row for row in latest(rows) if row.get("card") == card]
    over = {row["stage"] for row in mine if "done" in row or "skipped" in row}
    return over - {row["stage"] for row in mine if "error" in row}


def measured(rows: Iterable[Row], card: str, stage: str) -> frozenset[tuple[str, str, str]]:
    """Return model, side and dtype of a stage's rows on this card, without errors and rows of too few rounds."""
    unfit = {"done", "error", "partial"}
    mine = (row for row in latest(rows) if key(row)[:2] == (card, stage) and not unfit & row.keys())
    return frozenset(key(row)[2:] for row in mine)  # type: ignore[misc]


def main(arguments: Sequence[str] | None = None) -> int:
    """Add the rows in some folders to the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rows", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--into", type=Path, default=RESULTS, help="the folder of the results; default: %(default)s")
    options = parser.parse_args(arguments)
    found = [row for folder in options.folders for row in read(folder)]
    if not found:
        parser.error(f"no rows in {', '.join(str(folder / NAME) for folder in options.folders)}")
    options.into.mkdir(parents=True, exist_ok=True)
    kept = latest([*read(options.into), *found])
    part = options.into / f"{NAME}.part"
    part.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
    part.replace(options.into / NAME)
    print(f"{options.into / NAME}: {len(kept)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
