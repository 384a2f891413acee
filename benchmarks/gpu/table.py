"""Write the rows of ``benchmarks.gpu`` as Markdown tables, most important first.

python -m benchmarks.gpu.table DIR [DIR ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows as stored
from benchmarks.gpu.stage import Row

__all__ = ["markdown", "short", "step_table"]

SAID = {"torch": "torch", "triton": "triton", "transformers": "transformers", "python": "Python", "commit": "commit"}
ENVIRONMENT = "environment"
AUTOCAST = "torch.autocast"
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class _Pivot:
    """A table with a line for each model and dtype, and a column for each side.

    Attributes:
        stage: how the names of its stages begin.
        title: what stands above it.
        unit: of the baseline's column.
        baseline: the side whose ``own`` cell is shown; others show ``ratio``.
        own: the baseline's cell.
        ratio: another side's cell, of its row and the baseline's.
    """

    stage: str
    title: str
    unit: str
    own: Cell
    ratio: Callable[[Row, Row], str]
    baseline: str = AUTOCAST


def _quartiles(key: str) -> Callable[[Row, Row], str]:
    return lambda row, baseline: _cell(row.get(key) or "-")


def _number(key: str) -> Cell:
    return lambda row: _cell(row.get(key, "-"))


STEP = _quartiles("step_to_autocast")
STEPS = (
    _Pivot("eager step", "Time of a training step", "ms", _number("step_ms"), STEP),
    _Pivot("graph step", "Time of a training step replayed from a CUDA graph", "ms", _number("step_ms"), STEP),
    _Pivot("compiled step", "Time of a training step under torch.compile", "ms", _number("step_ms"), STEP),
)
OTHERS = (
    _Pivot(
        *("memory", "Peak memory of a training step, each side alone", "GB", lambda row: f"{row['peak'] / 1e9:.2f}"),
        lambda row, baseline: f"{row['peak'] / baseline['peak']:.3f}",
    ),
    _Pivot(
        *("parity", "Distance of the gradients from float64's", "error", lambda row: f"{row['gradients_error']:.2e}"),
        lambda row, baseline: f"{row['gradients_error'] / max(baseline['gradients_error'], 1e-12):.3f}",
    ),
    _Pivot(
        *("optimizer", "Time of the optimizer's part of a step", "ms", _number("step_ms")),
        *(_quartiles("step_to_grad_scaler"), "GradScaler"),
    ),
    _Pivot(
        *("Triton kernels", "Time of the Triton kernels, forward and backward", "ms", _number("step_ms")),
        *(_quartiles("step_to_parts"), "parts"),
    ),
)


def markdown(rows: Iterable[Row]) -> str:
    """Return for each card a caption, the tables, and what was not measured."""
    held = stored.latest(rows)
    cards = dict.fromkeys(row["card"] for row in held)
    return "\n\n".join(part for card in cards for part in _parts([row for row in held if row["card"] == card]))


def short(rows: Iterable[Row], card: str, most: int) -> str:
    """Return the tables of a card in at most ``most`` characters; what is left out is said."""
    lines = markdown(row for row in rows if row.get("card") == card).splitlines()
    left = 0
    while sum(map(len, lines)) + len(lines) > most - 80:
        lines.pop()
        left += 1
    return "\n".join([*lines, *([f"... {left} more lines: python -m benchmarks.gpu.table DIR"] if left else [])])


def step_table(rows: Iterable[Row]) -> str:
    """Return the table of eager steps alone, for each card; empty if there are no such rows."""
    held = stored.latest(rows)
    parts: list[str] = []
    for card in dict.fromkeys(row["card"] for row in held):
        mine = [row for row in held if row["card"] == card and row["stage"].startswith(STEPS[0].stage)]
        if table := _pivot(STEPS[0], mine):
            parts += [_caption(row for row in held if row["card"] == card), table]
    return "\n\n".join(parts)


def _parts(rows: Sequence[Row]) -> Iterator[str]:
    yield _caption(rows)
    yield from _pivots(STEPS, rows)
    if slower := list(_slower(rows)):
        yield "Slower than torch.autocast, with the kernels that take longer:\n\n" + "\n".join(slower)
    if missing := list(_missing(rows)):
        yield "Not measured:\n\n" + "\n".join(missing)
    yield from _pivots(OTHERS, rows)
    shown = tuple(pivot.stage for pivot in (*STEPS, *OTHERS))
    others: dict[tuple[str, frozenset[str]], list[Row]] = {}
    for row in rows:
        is_shown = row["stage"].startswith(shown) and not {"kernels", "host_ms"} & row.keys()
        if not is_shown and row["stage"] != ENVIRONMENT and not {"done", "error", "skipped"} & row.keys():
            others.setdefault((row["stage"].partition(",")[0], frozenset(row)), []).append(row)
    for (stage, _), same in others.items():
        yield f"{stage[0].upper()}{stage[1:]}:\n\n{_table(same)}"


def _pivots(pivots: Iterable[_Pivot], rows: Sequence[Row]) -> Iterator[str]:
    for pivot in pivots:
        if table := _pivot(pivot, [row for row in rows if row["stage"].startswith(pivot.stage)]):
            yield table


def _caption(rows: Iterable[Row]) -> str:
    """Return a line for each environment: device, versions, commit and date."""
    lines: dict[str, None] = {}
    for row in rows:
        if row["stage"] == ENVIRONMENT and "device" in row:
            versions = ", ".join(f"{name} {row[key]}" for key, name in SAID.items() if row.get(key))
            lines[f"{row['device']}; {versions}; {str(row['date']).partition(' ')[0]}."] = None
    return "\n".join(lines)


def _missing(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if why := row.get("error") or row.get("skipped"):
            named = (row["stage"], *(row[key] for key in stored.KEY[2:] if row.get(key)))
            yield f"- {', '.join(dict.fromkeys(named))}: {_cell(why)}"


def _slower(rows: Sequence[Row], most: int = 3) -> Iterator[str]:
    """Yield the sides whose steps take longer than torch.autocast's, and which kernels of the profiled steps do."""
    longest = {(row["model"], row["side"], row["dtype"]): row["longest"] for row in rows if "longest" in row}
    for row in rows:
        ratio = row.get("step_to_autocast")
        if not ratio or ratio[1] <= 1:
            continue
        names = [(f"{row['model']}, kernels", side, row["dtype"]) for side in (row["side"], AUTOCAST)]
        ours, theirs = (longest.get(name, {}) for name in names)
        more = {kernel: ms - theirs.get(kernel, 0.0) for kernel, ms in ours.items()}
        told = [f"{kernel[:60]} {more[kernel]:+.2f} ms" for kernel in sorted(more, key=lambda k: -more[k])[:most]]
        yield f"- {row['stage']}, {row['side']}, {row['dtype']}: {ratio[1]:.3f}; {', '.join(told) or 'not profiled'}"


def _pivot(pivot: _Pivot, rows: Iterable[Row]) -> str:
    """Return the table; empty if no row has anything to show."""
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if "side" in row and not {"error", "kernels", "host_ms"} & row.keys():
            lines.setdefault((row["model"], row.get("dtype", "")), {})[row["side"]] = row
    sides = dict.fromkeys(side for line in lines.values() for side in line if side != pivot.baseline)
    has_dtype = any(dtype for _, dtype in lines)
    head = ["model", *(["dtype"] if has_dtype else []), f"{pivot.baseline}, {pivot.unit}", *sides]
    body = [
        [model, *([dtype] if has_dtype else []), pivot.own(line[pivot.baseline])]
        + [pivot.ratio(line[side], line[pivot.baseline]) if side in line else "" for side in sides]
        for (model, dtype), line in lines.items()
        if pivot.baseline in line
    ]
    title = f"{pivot.title}: with {pivot.baseline}, and with the others as multiples of that"
    return f"{title}:\n\n{_lines(head, body)}" if body else ""


def _table(rows: Sequence[Row]) -> str:
    keys = dict.fromkeys((*stored.KEY[2:], *rows[0]))
    names = [key for key in keys if key not in (*stored.KEY[:2], "call")]
    names = [name for name in names if any(_cell(row.get(name, "")) for row in rows)]
    head = [name.replace("_", " ") for name in names]
    return _lines(head, [[_cell(row.get(name, "")) for name in names] for row in rows])


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) == 3 and all(isinstance(one, float) for one in value):
        return f"{value[1]:.3f} ({value[0]:.3f} to {value[2]:.3f})"  # quartiles
    if isinstance(value, list):
        return ", ".join(_cell(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(one)}" for key, one in value.items())
    return str(value).replace("|", "\\|").replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of the rows in some folders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.table", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    options = parser.parse_args(arguments)
    print(markdown(row for folder in options.folders for row in stored.read(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
