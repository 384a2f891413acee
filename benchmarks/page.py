"""Writes the tables of docs/benchmarks.md from the results that are kept.

    python -m benchmarks.page

A table follows a line ``<!-- results: NAME.json -->``, and before it stands where it was measured.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import accuracy, inference, memory, memory_per_parameter, optimizer_step, train_step

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
RESULTS = Path(__file__).resolve().parent / "results"
# By file: its table, as the benchmark prints it.
TABLES: dict[str, Callable[[Any], str]] = {
    "accuracy-cpu.json": lambda held: accuracy.table([accuracy.Row(**row) for row in held["rows"]]),
    "optimizer-step-cpu.json": lambda held: optimizer_step.table([optimizer_step.Row(**row) for row in held["rows"]]),
    "memory-per-parameter-cpu.json": lambda held: memory_per_parameter.table(
        [memory_per_parameter.Row(**row) for row in held["rows"]]
    ),
    "memory.json": lambda held: memory.table([memory.Row(**row) for row in held["rows"]]),
    "train-step-cpu.json": lambda held: train_step.table([train_step.Row(**row) for row in held["rows"]]),
    "inference-cpu.json": lambda held: inference.table([inference.Row(**row) for row in held["rows"]]),
}
_TABLE = re.compile(r"(<!-- results: (\S+) -->\n).*?\n```text\n.*?```\n", re.DOTALL)


def updated(page: str) -> str:
    """``page`` with each table as its results are."""

    def fresh(match: re.Match[str]) -> str:
        held = json.loads((RESULTS / match[2]).read_text(encoding="utf-8"))
        where = f"{held['device']}; torch {held['torch']}, Python {held['python']}, commit {held['commit']}."
        return f"{match[1]}\n{where}\n\n```text\n{TABLES[match[2]](held)}\n```\n"

    return _TABLE.sub(fresh, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
