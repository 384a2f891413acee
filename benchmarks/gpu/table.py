"""Write the rows of ``benchmarks.gpu`` as Markdown tables, most important first.

python -m benchmarks.gpu.table DIR [DIR ...]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import rows as stored
from benchmarks.gpu.plan import AUTOCAST, CALLS, CAST, EAGER, FASTEST, FUSED, RIVALS, plan
from benchmarks.gpu.stage import Row
from benchmarks.machine import changed_since, day_of
from benchmarks.timing import spread

SAID = {"torch": "torch", "triton": "triton", "transformers": "transformers", "python": "Python", "commit": "commit"}
ENVIRONMENT, FACTS = "environment", "kernel facts"
HIDDEN = ("card", "stage", "call", "commit", "longest")
WIDEST = 150  # characters of a cell that is no name
SIDES = {  # in the summary
    **{CAST: "default", FASTEST: 'cached weights, `fold="kernel"`'},
    FUSED: 'cached weights, `fold="kernel"`, `fuse="inductor"`',
}
# Operations a second of dense products in 16 bits, by the card's name. From NVIDIA's data sheets of the H100 and the
# H200, both SXM, which print twice as many, for sparse ones.
PEAKS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12}
KERNELS = ", kernels"  # after a model's name, where a row is of the kernels of its steps
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
    return lambda row, baseline: _cell(row.get(key) or "-", key)


def _number(key: str) -> Cell:
    return lambda row: _cell(row.get(key, "-"))


# How the names of stages that time steps begin, with what they time.
STEPS = {
    "eager step": "Training steps",
    "rival step": "Training steps of other ways to train",
    "Liger step": "Training steps of Liger's kernels",
    "graph step": "Training steps replayed from a CUDA graph",
    "compiled step": "Training steps under torch.compile",
}
TIMES = {"step": "step", "queued": "back to back", "kernels": "kernels"}
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
    mine = [row for row in rows if row.get("card") == card]
    lines = f"{step_summary(mine)}\n\n{markdown(mine)}".strip().splitlines()
    left = 0
    while sum(map(len, lines)) + len(lines) > most - 80:
        lines.pop()
        left += 1
    return "\n".join([*lines, *([f"... {left} more lines: python -m benchmarks.gpu.table DIR"] if left else [])])


def step_cards(rows: Iterable[Row]) -> str:
    """Return for each card that timed eager steps its name, the versions, the date and the age; empty if none did."""
    timed: dict[str, list[Row]] = {}
    held = stored.latest(rows)
    for row in held:
        if row["stage"].startswith("eager step"):
            timed.setdefault(row["card"], []).append(row)
    captions = {card: _caption(row for row in held if row["card"] == card) for card in timed}
    return "\n\n".join(f"{captions[card]}{_older(mine, itemgetter('stage'))}" for card, mine in timed.items())


def step_summary(rows: Iterable[Row]) -> str:
    """Return for each card a line a model and dtype: eager steps, as multiples of torch.autocast's, with quartiles.

    Those that run back to back, if all do.
    """
    held = stored.latest(rows)
    parts: list[str] = []
    for card in dict.fromkeys(row["card"] for row in held):
        mine = [row for row in held if row["card"] == card]
        timed = [row for row in mine if row["stage"].startswith("eager step") and row.get("step_to_autocast")]
        kind = "queued" if all("queued_ms" in row for row in timed) else "step"
        lines: dict[tuple[str, str], dict[str, str]] = {}
        middles: dict[str, list[float]] = {}
        for row in timed:
            lines.setdefault((row["model"], row["dtype"]), {})[row["side"]] = spread(row[f"{kind}_to_autocast"])
            middles.setdefault(row["side"], []).append(row[f"{kind}_to_autocast"][1])
        if len(lines) > 1:
            lines["all, median and range", ""] = {
                side: f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for side, each in middles.items()
            }
        sides = [side for side in dict.fromkeys(side for line in lines.values() for side in line) if side != AUTOCAST]
        body = [[*named, *(line.get(side, "") for side in sides)] for named, line in lines.items()]
        if body:
            how = "one of several run back to back" if kind == "queued" else "the device idle before it"
            parts += [
                f"Time of a training step (`python -m benchmarks.gpu`), {how}, to torch.autocast's, with quartiles. "
                f"{_caption(mine)}{_older(timed, itemgetter('model'))}",
                _lines(["model", "dtype", *(SIDES.get(side, side) for side in sides)], body),
            ]
    return "\n\n".join(parts)


def _older(rows: Iterable[Row], name_of: Callable[[Row], str]) -> str:
    """Say of what rows the code has changed since that decides them; empty if of none, or if git cannot tell."""
    paths = {stage.name: stage.paths for stage in plan([*CALLS], "cuda", is_tiny=False)}
    ages: dict[str, dict[str, bool]] = {}
    for row in rows:
        commit, stage = str(row.get("commit", "")), row["stage"]
        if stage != ENVIRONMENT:  # of a stage that is no longer there any change counts
            is_old = bool(commit) and changed_since(commit, paths.get(stage, ("autocastfx", "benchmarks")))
            known = ages.setdefault(name_of(row), {})
            known[commit] = known.get(commit, False) or is_old
    found: dict[str, list[str]] = {}
    for name, commits in ages.items():
        for commit, is_old in commits.items():
            if is_old:
                found.setdefault(commit, []).append(name)
    said = [
        f"{'all' if len(names) == len(ages) else ', '.join(names)} at commit {commit} of {day_of(commit)}"
        for commit, names in found.items()
    ]
    return f" Measured before the code changed that decides the figures: {'; '.join(said)}." if said else ""


def _parts(rows: Sequence[Row]) -> Iterator[str]:
    yield _caption(rows) + _older(rows, lambda row: row["stage"].partition(",")[0])
    for stage, title in STEPS.items():
        if table := _step_table(title, [row for row in rows if row["stage"].startswith(stage)]):
            yield table
    if slower := list(_slower(rows)):
        yield "Slower than torch.autocast, with the kernels that take longer:\n\n" + "\n".join(slower)
    if missing := list(_missing(rows)):
        yield "Not measured:\n\n" + "\n".join(missing)
    yield from _pivots(OTHERS, rows)
    shown = (*STEPS, *(pivot.stage for pivot in OTHERS))
    others: dict[str, list[Row]] = {}
    for row in rows:
        is_pivot, model = row["stage"].startswith(shown), row.get("model", "")
        is_shown = is_pivot and "host_ms" not in row
        if not is_shown and row["stage"] != ENVIRONMENT and not {"done", "error", "skipped"} & row.keys():
            stage = row["stage"].partition(",")[0]
            kind = model if stage == FACTS else model.rpartition(", ")[2] if is_pivot else ""
            others.setdefault(f"{stage}, {kind}" if kind else stage, []).append(row)
    for name, same in others.items():
        yield f"{name[0].upper()}{name[1:]}:\n\n{_table(same)}"


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


def _slower(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the sides whose steps take longer than torch.autocast's, and which kernels of the profiled steps do."""
    profiles = {(row["stage"], row["model"], row["side"], row["dtype"]): row for row in rows if "longest" in row}
    for row in rows:
        ratio = row.get("step_to_autocast")
        if not ratio or ratio[1] <= 1 or row["side"] in (*RIVALS, EAGER):
            continue
        names = [(row["stage"], f"{row['model']}{KERNELS}", side, row["dtype"]) for side in (row["side"], AUTOCAST)]
        ours, theirs = map(profiles.get, names)
        why = _longer(ours, theirs, row["step_ms"]) if ours and theirs else "not profiled"
        doubt = ", 1 is within the quartiles" if ratio[0] <= 1 else ""
        yield f"- {row['stage']}, {row['side']}, {row['dtype']}: {ratio[1]:.3f}{doubt}; {why}"


def _longer(ours: Row, theirs: Row, step: float, most: int = 3) -> str:
    """Name the kernels that take longer in our step of so many milliseconds.

    One that is not among the longest of theirs may be in their step, too, so the difference is the most it can be.
    """
    known = theirs["longest"]
    more = {kernel: ms - known.get(kernel, 0.0) for kernel, ms in ours["longest"].items()}
    found = sorted((kernel for kernel, ms in more.items() if ms >= max(0.05, step / 100)), key=lambda one: -more[one])
    if not found:
        spent = f"{ours['kernels_ms']:.2f} ms of kernels against {theirs['kernels_ms']:.2f}"
        return f"no single kernel takes longer: {spent}, the rest is the host's"
    return ", ".join(
        f"{_plain(kernel)} {'' if kernel in known else 'at most '}{more[kernel]:+.2f} ms" for kernel in found[:most]
    )


def _plain(kernel: str) -> str:
    """Return how a kernel's name begins, without namespaces."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", kernel)[:60]


def _step_table(title: str, rows: Iterable[Row]) -> str:
    """Return a line for each side: milliseconds, and quartiles of the ratios to torch.autocast's in the same rounds.

    What was measured at another commit is another line.
    """
    sides: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        if "step_ms" in row or "kernels_ms" in row:
            key = (row["model"].removesuffix(KERNELS), row["dtype"], row["side"], row.get("commit", ""))
            sides.setdefault(key, {}).update(row)
    lines: list[dict[str, str]] = []
    for (model, dtype, side, commit), row in sides.items():
        line = {"model": model, "dtype": dtype, "side": side}
        baseline = sides.get((model, dtype, AUTOCAST, commit), {}) if side != AUTOCAST else {}
        for key, name in TIMES.items():
            ms, ratios, theirs = row.get(f"{key}_ms"), row.get(f"{key}_to_autocast"), baseline.get(f"{key}_ms")
            line |= {f"{name}, ms": f"{ms:.4g}" if ms else "", f"{name}, ratio": ""}
            if ms and theirs:  # of kernels, older rows have one step
                line[f"{name}, ratio"] = spread(ratios, 3) if ratios else f"{ms / theirs:.3f}"
        if (ms := row.get("queued_ms")) and "items" in row:
            line["tokens or images/s"] = f"{1e3 * row['items'] / ms:,.0f}"
            line["MFU"] = f"{1e3 * row['flops'] / ms / PEAKS[row['card']]:.1%}" if row["card"] in PEAKS else ""
        line["number of kernels"] = str(row.get("kernels", ""))
        line["attention"] = _attention(row["attention"]) if "attention" in row else ""
        lines.append(line)
    return f"{title}, in milliseconds, and as ratios to {AUTOCAST}'s:\n\n{_filled(lines)}" if lines else ""


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
    told = [{**row, "attention": _attention(row["attention"])} if "attention" in row else row for row in rows]
    keys = dict.fromkeys((*stored.KEY[2:], *(key for row in told for key in row)))
    shown = [key for key in keys if key not in HIDDEN]
    return _filled([{key.replace("_", " "): _limited(row.get(key, ""), key) for key in shown} for row in told])


def _filled(lines: Sequence[Mapping[str, str]]) -> str:
    """Return a table of the columns in which some line has something."""
    head = [key for key in dict.fromkeys(key for line in lines for key in line) if any(line.get(key) for line in lines)]
    return _lines(head, [[line.get(key, "") for key in head] for line in lines])


def _attention(names: Iterable[str]) -> str:
    """Say whose attention runs, by the names of kernels, which also hold cuDNN's batch norms and products."""
    found: dict[str, None] = {}
    for name in map(str.lower, names):
        if "cudnn" in name:
            kind = "cudnn" if "sdpa" in name else ""
        else:
            kind = "flash" if "flash" in name else "efficient" if "fmha" in name or "efficient" in name else ""
        found[kind] = None
    return ", ".join(filter(None, found)) or "other or none"


def _limited(value: Any, key: str) -> str:
    """Return a cell; of what is too long the number of its entries, or its beginning."""
    cell = "none" if value in ([], {}) else _cell(value, key)
    if len(cell) <= WIDEST:
        return cell
    return f"{len(value)} entries" if isinstance(value, list | dict) else f"{cell[:WIDEST]}..."


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def _cell(value: Any, key: str = "") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) == 3 and ("to_" in key or "quartiles" in key):
        return f"{value[1]:.3f} ({value[0]:.3f} to {value[2]:.3f})"
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
