"""Write the tables and the pictures of the documentation from the stored results.

    python -m benchmarks.report

A table follows a line ``<!-- results: NAME.json -->`` and a sentence on the machine. What was measured on GPUs stands
between ``<!-- gpu: KIND -->`` and ``<!-- end -->``; the kinds are "steps", "picture", with the steps, and "all". The
metadata of a picture names its source, with a digest of the results and the drawing code. Pictures need the extra
``plot``.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    accuracy,
    compiled_step,
    conversion,
    conversion_zoo,
    cuda_plan,
    inference,
    losses,
    memory,
    memory_per_parameter,
    optimizer_step,
    pictures,
    placement,
    principles,
    reach,
    short_attention,
    step_table,
    tune_table,
    vocabulary,
)
from benchmarks.gpu import rows, table
from benchmarks.packages import table as packages_table
from benchmarks.packages.row import Row as PackageRow
from benchmarks.pictures import PICTURES, svg

README = Path(__file__).resolve().parents[1] / "README.md"
DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"
NAMES = ("benchmark-tables", "benchmarks", "placement", "precision", "tuning")
PAGES = (README, *(DOCS / f"{name}.md" for name in NAMES))
RESULTS = Path(__file__).resolve().parent / "results"
# By file: its table, as the benchmark prints it.
TABLES: dict[str, Callable[[Any], str]] = {
    "accuracy-cpu.json": lambda held: accuracy.table([accuracy.Row(**row) for row in held["rows"]]),
    "optimizer-step-cpu.json": lambda held: optimizer_step.table([optimizer_step.Row(**row) for row in held["rows"]]),
    "memory-per-parameter-cpu.json": lambda held: memory_per_parameter.table(
        [memory_per_parameter.Row(**row) for row in held["rows"]]
    ),
    "conversion-cpu.json": lambda held: conversion.table([conversion.Row(**row) for row in held["rows"]]),
    "conversion-zoo-cpu.json": lambda held: conversion_zoo.table([conversion_zoo.Row(**row) for row in held["rows"]]),
    "cuda_plan.json": lambda held: cuda_plan.table([cuda_plan.Row(**row) for row in held["rows"]]),
    "placement.json": lambda held: placement.table([placement.Row(**row) for row in held["rows"]]),
    "principles-cpu.json": lambda held: principles.table([principles.Row(**row) for row in held["rows"]]),
    "memory.json": lambda held: memory.table([memory.Row(**row) for row in held["rows"]]),
    "train-step-cpu.json": lambda held: step_table.table([step_table.Row(**row) for row in held["rows"]]),
    "train-step-default-cpu.json": lambda held: step_table.table([step_table.Row(**row) for row in held["rows"]]),
    "train-step-compiled-cpu.json": lambda held: step_table.compiled_table(
        [step_table.Row(**row) for row in held["rows"]]
    ),
    "compiled-step-cpu.json": lambda held: compiled_step.table([compiled_step.Row(**row) for row in held["rows"]]),
    "packages-cpu.json": lambda held: packages_table.table([PackageRow(**row) for row in held["rows"]]),
    "packages-mended-cpu.json": lambda held: packages_table.table([PackageRow(**row) for row in held["rows"]]),
    "reach-cpu.json": lambda held: reach.table([reach.Row(**row) for row in held["rows"]]),
    "tune-cpu.json": lambda held: tune_table.table([tune_table.Row(**row) for row in held["rows"]]),
    "vocabulary-cpu.json": lambda held: vocabulary.table([vocabulary.Row(**row) for row in held["rows"]]),
    "short-attention-cpu.json": lambda held: short_attention.table(
        [short_attention.Row(**row) for row in held["rows"]]
    ),
    "losses-cpu.json": lambda held: losses.table([losses.Run(**row) for row in held["rows"]]),
    "inference-cpu.json": lambda held: inference.table([inference.Row(**row) for row in held["rows"]]),
}
_TABLE = re.compile(r"(<!-- results: (\S+) -->\n).*?\n```text\n.*?```\n", re.DOTALL)
_GPU = re.compile(r"(<!-- gpu: (steps|picture|all) -->\n).*?(<!-- end -->\n)", re.DOTALL)
NO_GPU = "No figure was measured on a GPU yet."
GPU_PICTURE = """![Time of a training step on a GPU of the default, of cached weights with fold="kernel" and of pure
half, to torch.autocast's, by model and dtype](images/gpu-step.svg)"""


def updated(page: str) -> str:
    """Return ``page`` with each table replaced by the stored results."""

    def fresh(match: re.Match[str]) -> str:
        held = json.loads((RESULTS / match[2]).read_text(encoding="utf-8"))
        return f"{match[1]}\n{_where(held)}\n\n```text\n{TABLES[match[2]](held)}\n```\n"

    return _GPU.sub(lambda match: f"{match[1]}\n{_on_gpus(match[2])}\n\n{match[3]}", _TABLE.sub(fresh, page))


def _on_gpus(kind: str) -> str:
    measured = rows.read(RESULTS / "gpu")
    tables = {"all": table.markdown, "steps": table.step_summary, "picture": table.step_table}
    found = tables[kind](measured)
    return f"{GPU_PICTURE}\n\n{found}" if found and kind == "picture" else found or NO_GPU


def _where(held: dict[str, Any]) -> str:
    """Describe the machine and versions of the measurement, as far as the file says."""
    named = {"torch": "torch", "networkx": "networkx", "transformers": "transformers", "python": "Python"}
    said = [f"{name} {held[key]}" for key, name in named.items() if key in held]
    return f"{held['device']}; {', '.join(said)}; measured {held['date']} at commit {held['commit']}."


def described(name: str) -> str:
    """Return the metadata that an up-to-date picture of this name has."""
    results = PICTURES[name].results
    parts = (RESULTS / results, Path(pictures.__file__))
    digest = hashlib.sha256("".join(part.read_text(encoding="utf-8") for part in parts).encode()).hexdigest()
    return f"Drawn from benchmarks/results/{results} by benchmarks/pictures.py, digest {digest[:16]}"


def results_of(name: str) -> list[dict[str, Any]]:
    """Return the stored rows that the picture of this name is drawn from."""
    path = RESULTS / PICTURES[name].results
    return rows.read(path.parent) if path.name == rows.NAME else json.loads(path.read_text(encoding="utf-8"))["rows"]


def drawn(name: str) -> str:
    """Draw the picture of this name as SVG."""
    picture = PICTURES[name]
    chosen = [picture.row(**row) for row in results_of(name) if picture.model in ("", row.get("model"))]
    return svg(picture.draw(chosen), described(name))


def shown() -> list[str]:
    """Return the names of the pictures whose results are there."""
    return [name for name, picture in PICTURES.items() if (RESULTS / picture.results).exists()]


def stale() -> list[str]:
    """Return the pages and pictures that do not match the stored results."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    found = [name for name, text in pages.items() if updated(text) != text]
    images = {name: IMAGES / name for name in shown()}
    return found + [
        name
        for name, path in images.items()
        if not path.exists() or f">{described(name)}<" not in path.read_text(encoding="utf-8")
    ]


def main() -> int:
    """Write the stale pages and pictures, and name them."""
    pages = {page.name: page for page in PAGES}
    for name in stale():
        if name in PICTURES:
            (IMAGES / name).write_text(drawn(name), encoding="utf-8")
        else:
            pages[name].write_text(updated(pages[name].read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
