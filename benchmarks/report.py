"""Write tables and pictures from the stored results.

    python -m benchmarks.report

Each file of results has a table in ``benchmarks/results/tables``, with the method before it: the docstring of the
benchmark. What GPUs measured is there in ``gpu.md``. A page of the documentation can show a table too, after a line
``<!-- results: NAME.json -->`` and a sentence on the machine. Between ``<!-- gpu: KIND -->`` and ``<!-- end -->`` it
shows steps on GPUs; the kinds are "steps", a table, and "picture".

Pictures are SVG, the same each time, and need the extra ``plot``. Their metadata names the source, with a digest of the
results and of this file. Their ground is white, on dark pages too. Colours are those of Okabe and Ito, which
colour-blind people tell apart, and each side has a marker of its own besides.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from benchmarks import (
    accuracy,
    compiled_step,
    conversion,
    float8,
    float8_training,
    inference,
    losses,
    memory,
    optimizer_step,
    placement,
    principles,
    reach,
    saved,
    step_table,
    tune_table,
    vocabulary,
)
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import table as gpu_table
from benchmarks.packages import table as packages_table
from benchmarks.packages.row import Row as PackageRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

README = Path(__file__).resolve().parents[1] / "README.md"
DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"
RESULTS = Path(__file__).resolve().parent / "results"
_TABLE = re.compile(r"(<!-- results: (\S+) -->\n).*?\n```text\n.*?```\n", re.DOTALL)
_GPU = re.compile(r"(<!-- gpu: (steps|picture) -->\n).*?(<!-- end -->\n)", re.DOTALL)
# Those that show a table.
PAGES = tuple(
    page
    for page in (README, *sorted(DOCS.glob("*.md")))
    if any(marker.search(page.read_text(encoding="utf-8")) for marker in (_TABLE, _GPU))
)


@dataclass(frozen=True)
class Table:
    """How a file of results becomes a table.

    Attributes:
        row: what one of its rows is.
        write: gives the table that the benchmark prints.
        method: the file of the benchmark, whose docstring says what was measured and what the columns are.
    """

    row: Callable[..., Any]
    write: Callable[[list[Any]], str]
    method: str


TABLES: dict[str, Table] = {
    "accuracy-cpu.json": Table(accuracy.Row, accuracy.table, "accuracy.py"),
    "optimizer-step-cpu.json": Table(optimizer_step.Row, optimizer_step.table, "optimizer_step.py"),
    "memory-per-parameter-cpu.json": Table(memory.ParameterRow, memory.parameter_table, "memory.py"),
    "conversion-cpu.json": Table(conversion.Row, conversion.table, "conversion.py"),
    "conversion-zoo-cpu.json": Table(conversion.ZooRow, conversion.zoo_table, "conversion.py"),
    "placement.json": Table(placement.Row, placement.table, "placement.py"),
    "principles-cpu.json": Table(principles.Row, principles.table, "principles.py"),
    "saved-cpu.json": Table(saved.SavedRow, saved.table, "saved.py"),
    "memory.json": Table(memory.Row, memory.table, "memory.py"),
    "memory-float8.json": Table(memory.Row, memory.table, "memory.py"),
    "float8-cpu.json": Table(float8.Row, float8.table, "float8.py"),
    "float8-training-cpu.json": Table(float8_training.Run, float8_training.table, "float8_training.py"),
    "train-step-cpu.json": Table(step_table.Row, step_table.table, "train_step.py"),
    "train-step-default-cpu.json": Table(step_table.Row, step_table.table, "train_step.py"),
    "train-step-compiled-cpu.json": Table(step_table.Row, step_table.compiled_table, "train_step.py"),
    "compiled-step-cpu.json": Table(compiled_step.Row, compiled_step.table, "compiled_step.py"),
    "packages-cpu.json": Table(PackageRow, packages_table.table, "packages/__main__.py"),
    "reach-cpu.json": Table(reach.Row, reach.table, "reach.py"),
    "tune-cpu.json": Table(tune_table.Row, tune_table.table, "tune.py"),
    "vocabulary-cpu.json": Table(vocabulary.Row, vocabulary.table, "vocabulary.py"),
    "losses-cpu.json": Table(losses.Run, losses.table, "losses.py"),
    "inference-cpu.json": Table(inference.Row, inference.table, "inference.py"),
}
NO_GPU = "No figure was measured on a GPU yet."
GPU_PICTURE = """![Time of a training step on a GPU of the default, of cached weights with fold="kernel" and of pure
half, to torch.autocast's, by model and dtype](images/gpu-step.svg)"""


# ---- pictures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a side is drawn in all pictures."""

    colour: str
    marker: str


_EXACT, _KERNEL, _HALF = Look("#0072B2", "o"), Look("#D55E00", "D"), Look("#009E73", "s")
_AUTOCAST, _CONTROL, _MASTERS = Look("#000000", "X"), Look("#777777", "P"), Look("#CC79A7", "v")
_LOOKS = (_EXACT, _KERNEL, _HALF, _AUTOCAST, _CONTROL, _MASTERS)
_STYLE = {
    **{"svg.fonttype": "none", "svg.hashsalt": "autocastfx", "font.size": 10, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"},
}
_BAND = "#f2f2f2"  # behind every other row
_MOST = 2.2  # an axis of ratios ends here at the latest
# By label: a value, or its quartiles.
Points = Mapping[str, "float | Sequence[float]"]


@dataclass(frozen=True)
class Dots:
    """The points on one axis, by side; ``to`` names what their ratios are to."""

    title: str
    to: str
    sides: Mapping[str, Points]


def svg(figure: Figure, description: str) -> str:
    """The picture as text, with ``description`` in its metadata."""
    from matplotlib import style

    out = io.StringIO()
    with style.context(["default", _STYLE]):
        figure.savefig(out, format="svg", metadata={"Date": None, "Description": description})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _figure(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Any]]:
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):  # whatever the user's own is
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # inches
        return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def _dots(parts: Sequence[Dots], looks: Mapping[str, Look], width: float) -> Figure:
    """Ratios by label, one row each, beside a line at 1; what is beyond an axis is a number at its end."""
    labels = list(dict.fromkeys(label for part in parts for points in part.sides.values() for label in points))
    figure, axes = _figure(width, 1.5 + 0.42 * len(labels), len(parts), sharey=True)
    for axis, part in zip(axes, parts, strict=True):
        found = [number for points in part.sides.values() for value in points.values() for number in _three(value)]
        shown = [1.0, *(number for number in found if number <= _MOST)]
        pad = 0.06 * (max(shown) - min(shown))
        end = max(shown) + (pad if max(found) <= _MOST else 5 * pad)  # with room for the numbers of what is beyond
        axis.set_xlim(min(shown) - pad, end)
        axis.axvline(1, color="black", linewidth=1.2)
        for row in range(1, len(labels), 2):
            axis.axhspan(row - 0.5, row + 0.5, color=_BAND, linewidth=0, zorder=0)
        for place, (side, points) in enumerate(part.sides.items()):
            look, offset = looks[side], 0.24 * (place - (len(part.sides) - 1) / 2)
            for label, value in points.items():
                _dot(axis, labels.index(label) + offset, _three(value), look, end)
        axis.set_title(part.title, fontsize=11)
        axis.set_xlabel(f"times {part.to}")
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    _legend(figure, looks)
    return figure


def _three(value: float | Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = (value,) * 3 if isinstance(value, (float, int)) else value
    return low, middle, high


def _dot(axis: Any, y: float, quartiles: tuple[float, float, float], look: Look, end: float) -> None:
    low, middle, high = quartiles
    if middle > end:
        axis.text(end, y, f"{middle:.3g} \u2192", color=look.colour, ha="right", va="center", fontweight="bold")
        return
    axis.plot([low, min(high, end)], [y, y], color=look.colour, linewidth=2)
    axis.plot(middle, y, look.marker, color=look.colour, markersize=6)


def _legend(figure: Figure, looks: Mapping[str, Look]) -> None:
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], color=look.colour, marker=look.marker, linestyle="") for look in looks.values()]
    figure.legend(keys, list(looks), loc="outside lower center", ncols=len(looks), frameon=False)


def _train_step(rows: Sequence[step_table.Row]) -> Figure:
    autocast = {row.model: row for row in rows if row.side == step_table.AUTOCAST}

    def of(number: Callable[[step_table.Row], float]) -> dict[str, Points]:
        chosen = ((side, [row for row in rows if row.side == side and not row.note]) for side in looks)
        return {side: {row.model: number(row) / number(autocast[row.model]) for row in found} for side, found in chosen}

    looks = {step_table.DEFAULT: _EXACT, step_table.FASTEST: _KERNEL, step_table.HALF: _HALF}
    timed = [row for row in rows if row.backward_to_autocast]
    times = {side: {row.model: row.backward_to_autocast for row in timed if row.side == side} for side in looks}
    parts = [
        Dots("forward and backward, time", "torch.autocast's", times),
        Dots("bytes that casts move", "torch.autocast's", of(lambda row: row.cast_bytes)),
        Dots("bytes saved for backward", "torch.autocast's", of(lambda row: row.saved)),
    ]
    return _dots(parts, looks, 9.2)


def _memory(rows: Sequence[memory.Row]) -> Figure:
    looks = {"fold=exact": _EXACT, memory.KERNEL: _KERNEL, memory.HALF: _HALF}
    sides = {side: memory.ratios(rows, side, memory.AUTOCAST) for side in looks}
    return _dots([Dots("bytes of activations saved for backward", f"{memory.AUTOCAST}'s", sides)], looks, 8)


def _placement(rows: Sequence[placement.Row]) -> Figure:
    looks = {"default, fold=exact": _EXACT, "default, fold=kernel": _KERNEL}
    sides = {
        side: {row.model: row.ratio for row in rows if row.policy == side and row.ratio is not None} for side in looks
    }
    return _dots([Dots("bytes that casts of activations move", "torch_autocast_cuda's", sides)], looks, 8)


def _optimizer_step(rows: Sequence[optimizer_step.Row]) -> Figure:
    looks = {optimizer_step.OURS: _EXACT, optimizer_step.BARE: _HALF}
    mine = {side: [row for row in rows if row.side == side] for side in looks}
    sides = {
        side: {f"{row.optimizer}, {row.parameters} parameters": row.ratio for row in found}
        for side, found in mine.items()
    }
    return _dots([Dots("the host's time of an optimizer's step", "GradScaler's", sides)], looks, 8)


def _conversion(rows: Sequence[conversion.Row]) -> Figure:
    figure, (axis,) = _figure(8, 4.2)
    for shape, look in zip(dict.fromkeys(row.shape for row in rows), _LOOKS, strict=False):
        mine = [row for row in rows if row.shape == shape]
        nodes, seconds = [row.nodes for row in mine], [row.classify + row.place for row in mine]
        axis.loglog(nodes, seconds, color=look.colour, marker=look.marker, label=shape)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("nodes of the graph")
    axis.set_ylabel("seconds to classify and place")
    axis.legend(frameon=False, title="shape")
    return figure


_FOLLOWING = {
    **{losses.CONTROL: _CONTROL, losses.AUTOCAST: _AUTOCAST, losses.DEFAULT: _EXACT, losses.FASTEST: _KERNEL},
    **{losses.MASTERS: _MASTERS, losses.HALF: _HALF},
}


def _losses(rows: Sequence[losses.Run]) -> Figure:
    found = losses.rows(rows)
    models, sides = (list(dict.fromkeys(getattr(row, name) for row in found)) for name in ("model", "side"))
    figure, axes = _figure(9.2, 3.6, len(models), sharex=True, sharey=True)
    for axis, model in zip(axes, models, strict=True):
        for row in (row for row in found if row.model == model):
            look, y = _FOLLOWING[row.side], sides.index(row.side)
            middle = geometric_mean(row.distances)
            axis.plot(row.distances, [y] * len(row.distances), look.marker, color=look.colour, alpha=0.7)
            axis.plot([middle] * 2, [y - 0.35, y + 0.35], color=look.colour, linewidth=2.5)
            if row.side == losses.AUTOCAST:
                axis.axvline(middle, color="black", linewidth=1.2)
        for y in range(1, len(sides), 2):
            axis.axhspan(y - 0.5, y + 0.5, color=_BAND, linewidth=0, zorder=0)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(model, fontsize=11)
        axis.set_xlabel("distance from float32, nats")
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(sides)), sides)
    axes[0].set_ylim(len(sides) - 0.5, -0.5)
    return figure


@dataclass(frozen=True)
class Picture:
    """A picture, and the file of results that it is drawn from: all rows, or those of ``model`` alone."""

    results: str
    row: Callable[..., Any]
    draw: Callable[[Any], Figure]
    model: str = ""


def _principles(rows: Sequence[principles.Row]) -> Figure:
    """An axis for each principle: the error of each side, from small to large."""
    looks = {principles.OURS: _EXACT, principles.AUTOCAST: _AUTOCAST, principles.HALF: _HALF}
    titles = {
        "provenance": ("Steps of an ODE", "steps"),
        "shape": ("Rotary angles", "position"),
        "demand": ("log(1 - p)", "logit of p"),
    }
    figure, axes = _figure(9, 3.6, len(titles))
    for axis, (principle, (title, label)) in zip(axes, titles.items(), strict=True):
        for size, (side, look) in zip((11, 8, 5), reversed(looks.items()), strict=True):  # equal ones are all seen
            points = sorted((row.x, row.error) for row in rows if (row.principle, row.side) == (principle, side))
            axis.plot(*zip(*points, strict=True), look.marker, linestyle="-", color=look.colour, markersize=size)
        axis.set(title=title, xlabel=label, yscale="log")
        if principle != "demand":
            axis.set_xscale("log")
    axes[0].set_ylabel("relative error")
    _legend(figure, looks)
    return figure


def _tune_front(rows: Sequence[tune_table.Row]) -> Figure:
    """Bytes against error: the tuned plans that no other tuned plan beats, connected; and the op lists."""
    row = next(row for row in rows if row.dtype == "bfloat16")
    figure, (axis,) = _figure(8, 4.4)
    points = [*row.front, [row.fewer_bytes, row.fewer_error], [row.nearer_bytes, row.nearer_error]]
    front: list[list[float]] = []
    for moved, error in sorted(points):
        if error > 0 and (not front or error < front[-1][1]):  # an axis of ratios holds no 0
            front.append([moved, error])
    axis.plot(*zip(*front, strict=True), _EXACT.marker, linestyle="-", color=_EXACT.colour, label="tuned")
    axis.plot(*([x] for x in row.kernel), _KERNEL.marker, color=_KERNEL.colour, label="tuned, fold=kernel")
    for name, (moved, error) in {tune_table.DEFAULT: [1.0, 1.0], **row.lists}.items():
        if moved:
            is_right = moved > 1.2
            axis.plot(moved, error, _AUTOCAST.marker, color=_AUTOCAST.colour)
            place = {"xytext": (-7 if is_right else 7, 6), "ha": "right" if is_right else "left"}
            axis.annotate(name, (moved, error), textcoords="offset points", **place)
        else:  # bytes that are not counted
            axis.axhline(error, color=_CONTROL.colour, linestyle="--", label=f"{name}, bytes not counted")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(x=0.12, y=0.1)
    axis.set(title=f"{row.model}, {row.dtype}", xlabel="bytes moved, times the default list's")
    axis.set_ylabel("error of the gradient, times the default list's")
    axis.legend(frameon=False, loc="lower left")
    return figure


def _float8_front(rows: Sequence[float8.Row]) -> Figure:
    """An axis for each of three models: the share of operations in float8 against the error of the gradient."""
    shown = [row for row in rows if row.model in ("Llama 4x128", "GPT-2 4x128", "MiniLM 6x384")]
    figure, axes = _figure(9.2, 3.8, len(shown))
    for axis, row in zip(axes, shown, strict=True):
        tuned = sorted([[0.0, row.bfloat16], *(point[:2] for point in row.tuned.values()), [1.0, row.all]])
        axis.plot(*zip(*tuned, strict=True), _EXACT.marker, linestyle="-", color=_EXACT.colour, label="tuned")
        usual = [point[:2] for point in row.rules.values()]
        axis.plot(*zip(*usual, strict=True), _KERNEL.marker, linestyle="", color=_KERNEL.colour, label="usual rules")
        for rule, (share, error, _) in row.rules.items():
            place = (-7, -7 if rule == "blocks" else 4)  # the two of other rules may lie on one another
            axis.annotate(rule, (share, error), xytext=place, textcoords="offset points", ha="right")
        axis.set(title=row.model, xlabel="operations in float8", xlim=(-0.05, 1.05))
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes[0].set_ylabel("error of the gradient")
    axes[0].legend(frameon=False, loc="upper left")
    return figure


def _gpu_step(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """An axis for each card: the time of eager steps to torch.autocast's."""
    looks = {step_table.DEFAULT: _EXACT, step_table.FASTEST: _KERNEL, step_table.HALF: _HALF}
    timed = [
        row for row in gpu_rows.latest(rows) if row["stage"].startswith("eager step") and row.get("step_to_autocast")
    ]
    parts = []
    for card in dict.fromkeys(row["card"] for row in timed):
        mine = [row for row in timed if row["card"] == card]
        sides: dict[str, Points] = {
            side: {f"{row['model']}, {row['dtype']}": row["step_to_autocast"] for row in mine if row["side"] == side}
            for side in looks
        }
        parts.append(Dots(f"training step, time, {card}", "torch.autocast's", sides))
    return _dots(parts, looks, 9.2)


PICTURES: dict[str, Picture] = {
    "gpu-step.svg": Picture("gpu/rows.jsonl", dict, _gpu_step),
    "principles.svg": Picture("principles-cpu.json", principles.Row, _principles),
    "train-step.svg": Picture("train-step-cpu.json", step_table.Row, _train_step),
    "memory.svg": Picture("memory.json", memory.Row, _memory),
    "placement.svg": Picture("placement.json", placement.Row, _placement),
    "optimizer-step.svg": Picture("optimizer-step-cpu.json", optimizer_step.Row, _optimizer_step),
    "conversion.svg": Picture("conversion-cpu.json", conversion.Row, _conversion),
    "losses.svg": Picture("losses-cpu.json", losses.Run, _losses),
    "float8-front.svg": Picture("float8-cpu.json", float8.Row, _float8_front),
    "tune-front.svg": Picture("tune-cpu.json", tune_table.Row, _tune_front, "GPT-2 2x64"),
}


# ---- tables and pages ------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """Return the files of ``benchmarks/results/tables`` by their name, as they follow from the stored results."""
    found = {f"{name.removesuffix('.json')}.txt": _with_method(name) for name in TABLES if (RESULTS / name).exists()}
    on_gpus = gpu_table.markdown(gpu_rows.read(RESULTS / "gpu"))
    return found | ({"gpu.md": f"# Measured on GPUs\n\n{_method('gpu/__main__.py')}\n\n{on_gpus}\n"} if on_gpus else {})


def _with_method(name: str) -> str:
    held = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return f"{_method(TABLES[name].method)}\n\n{'-' * 80}\n{_where(held)}\n\n{_written(name, held)}\n"


def _method(path: str) -> str:
    """The docstring of a benchmark; it is not imported, for that may need other packages."""
    source = (Path(__file__).parent / path).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def _written(name: str, held: Mapping[str, Any]) -> str:
    return TABLES[name].write([TABLES[name].row(**row) for row in held["rows"]])


def updated(page: str) -> str:
    """Return ``page`` with each table replaced by the stored results."""

    def fresh(match: re.Match[str]) -> str:
        held = json.loads((RESULTS / match[2]).read_text(encoding="utf-8"))
        return f"{match[1]}\n{_where(held)}\n\n```text\n{_written(match[2], held)}\n```\n"

    return _GPU.sub(lambda match: f"{match[1]}\n{_on_gpus(match[2])}\n\n{match[3]}", _TABLE.sub(fresh, page))


def _on_gpus(kind: str) -> str:
    measured = gpu_rows.read(RESULTS / "gpu")
    found = {"steps": gpu_table.step_summary, "picture": gpu_table.step_cards}[kind](measured)
    return f"{GPU_PICTURE}\n\n{found}" if found and kind == "picture" else found or NO_GPU


def _where(held: dict[str, Any]) -> str:
    """Describe the machine and versions of the measurement, as far as the file says."""
    named = {"torch": "torch", "networkx": "networkx", "transformers": "transformers", "python": "Python"}
    said = [f"{name} {held[key]}" for key, name in named.items() if key in held]
    besides = f", {held['besides']}" if "besides" in held else ""  # rows of another commit
    return f"{held['device']}; {', '.join(said)}; measured {held['date']} at commit {held['commit']}{besides}."


def described(name: str) -> str:
    """Return the metadata that an up-to-date picture of this name has."""
    results = PICTURES[name].results
    parts = (RESULTS / results, Path(__file__))
    digest = hashlib.sha256("".join(part.read_text(encoding="utf-8") for part in parts).encode()).hexdigest()
    return f"Drawn from benchmarks/results/{results} by benchmarks/report.py, digest {digest[:16]}"


def results_of(name: str) -> list[dict[str, Any]]:
    """Return the stored rows that the picture of this name is drawn from."""
    path = RESULTS / PICTURES[name].results
    return (
        gpu_rows.read(path.parent)
        if path.name == gpu_rows.NAME
        else json.loads(path.read_text(encoding="utf-8"))["rows"]
    )


def drawn(name: str) -> str:
    """Draw the picture of this name as SVG."""
    picture = PICTURES[name]
    chosen = [picture.row(**row) for row in results_of(name) if picture.model in ("", row.get("model"))]
    return svg(picture.draw(chosen), described(name))


def shown() -> list[str]:
    """Return the names of the pictures whose results are there."""
    return [name for name, picture in PICTURES.items() if (RESULTS / picture.results).exists()]


def stale() -> list[str]:
    """Return the pages, tables and pictures that do not match the stored results."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    found = [name for name, text in pages.items() if updated(text) != text]
    found += [name for name, text in tables().items() if _text(RESULTS / "tables" / name) != text]
    return found + [name for name in shown() if f">{described(name)}<" not in _text(IMAGES / name)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Write the stale pages, tables and pictures, and name them."""
    pages = {page.name: page for page in PAGES}
    written = tables()
    (RESULTS / "tables").mkdir(exist_ok=True)
    for name in stale():
        if name in PICTURES:
            (IMAGES / name).write_text(drawn(name), encoding="utf-8")
        elif name in written:
            (RESULTS / "tables" / name).write_text(written[name], encoding="utf-8")
        else:
            pages[name].write_text(updated(pages[name].read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
