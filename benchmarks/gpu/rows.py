"""Rows of ``benchmarks.gpu``: JSON objects, one a line, each appended at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.stage import Row

__all__ = ["KEY", "append", "ended", "held", "read"]

NAME = "rows.jsonl"
KEY = ("call", "stage", "model", "side", "dtype")


def append(folder: Path, row: Row) -> None:
    """Write ``row`` in one piece, so that processes that write at the same time do not mix."""
    line = json.dumps(row) + "\n"
    file = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(folder: Path) -> list[Row]:
    """Return the rows in a folder; none if it has no file of rows.

    Raises:
        ValueError: a line is no JSON object; with file and line.
    """
    path, found = folder / NAME, list[Row]()
    if not path.exists():
        return found
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: no JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: no JSON object: {line[:60]}")
        found.append(row)
    return found


def ended(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Return the call and name of the stages that are not to be run again: those done or skipped."""
    return {(row["call"], row["stage"]) for row in rows if "done" in row or "skipped" in row}


def held(rows: Iterable[Row], call: str, stage: str) -> frozenset[tuple[str, str, str]]:
    """Return the model, side and dtype of a stage's rows, without errors."""
    mine = (row for row in rows if (row["call"], row["stage"]) == (call, stage) and not {"done", "error"} & row.keys())
    return frozenset((row.get("model", ""), row.get("side", ""), row.get("dtype", "")) for row in mine)
