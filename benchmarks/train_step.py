"""What a training step costs: counted and timed beside float32, torch.autocast and a model that is 16-bit by hand.

    python -m benchmarks.train_step [--models "BERT 4x256"] [--rounds 0] [--json PATH]
    python -m benchmarks.train_step --device cuda --dtype float16 --json PATH
    python -m benchmarks.train_step --compile --sides "float32|torch.autocast|cast, fold=exact|pure half"

Counted is one forward and backward after an update: operators (views and allocations not counted), casts, and the
bytes that forward saves for backward beside parameters and their casts. Casts of weights are counted apart, and so are
casts that give the gradient of a weight.

Timed are, in each round, forward and backward of each side with its working copies fresh, and a whole step (forward,
backward, fused AdamW), where they are made anew. The sides take turns and each round begins with another; a side's
ratio is its time to the other's in the same round: medians, with quartiles. On a CPU times are those of the one thread,
so that other processes count less; on a GPU they are wall time, synchronised. float16 losses are scaled: by GradScaler
under torch.autocast, else by LossScalingOptimizer, with masters for the model that is 16-bit.

With ``--json`` each model is written at once, and those of the same commit are not measured again. The exit status is 1
where something is above a limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

import autocastfx
from benchmarks.small_models import SMALL
from benchmarks.step_counts import count
from benchmarks.store import Store
from benchmarks.timing import milliseconds, ratios, turns
from benchmarks.training import AUTOCAST, DEFAULT, FASTEST, HALF, SIDES, Setting, Training, training

WARM_UP = 2  # steps before anything is measured
ROUNDS = 12
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Row:
    """One side of one model; bytes, milliseconds, and quartiles of the ratios of each round. A note says what misses.

    Times are None where none were taken, ``peak`` where there is no GPU: the bytes that a step adds at most.
    """

    model: str
    side: str
    parameters: int = 0
    ops: int = 0
    step_ops: int = 0
    weight_casts: int = 0
    weight_bytes: int = 0
    gradient_casts: int = 0
    gradient_bytes: int = 0
    activation_casts: int = 0
    activation_bytes: int = 0
    saved: int = 0
    peak: int | None = None
    backward_ms: float | None = None
    step_ms: float | None = None
    backward_to_autocast: Sequence[float] = ()
    backward_to_half: Sequence[float] = ()
    step_to_autocast: Sequence[float] = ()
    note: str = ""

    @property
    def cast_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.activation_bytes


def counts(name: str, side: str, found: Training, device: str) -> dict[str, Any]:
    """The counted fields of a row."""
    for _ in range(WARM_UP):
        found.forward_and_backward()
        found.step()
    done = count(found.model, found.inputs.values(), found.forward_and_backward)
    step = count(found.model, (), found.step)
    peak = None
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found.forward_and_backward()
        found.step()
        peak = torch.cuda.max_memory_allocated() - before
    return {
        **{"model": name, "side": side, "parameters": len(list(found.model.parameters()))},
        **{"ops": done.ops, "step_ops": step.ops, "saved": done.saved().activations, "peak": peak},
        **{"weight_casts": done.weights.count, "weight_bytes": done.weights.bytes},
        **{"gradient_casts": done.gradients.count, "gradient_bytes": done.gradients.bytes},
        **{"activation_casts": done.activations.count, "activation_bytes": done.activations.bytes},
    }


def times(sides: Mapping[str, Training], rounds: int, device: str) -> dict[str, tuple[list[float], list[float]]]:
    """By side: milliseconds of forward and backward, and of a whole step, in each round."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sides}
    for is_counted, name in turns(list(sides), rounds):
        side = sides[name]

        def whole(side: Training = side) -> None:
            side.forward_and_backward()
            side.step()
            side.prepare()

        side.prepare()
        backward = milliseconds(side.forward_and_backward, device)
        side.model.zero_grad()
        step = milliseconds(whole, device)
        if is_counted:
            found[name][0].append(backward)
            found[name][1].append(step)
    return found


def measure(name: str, setting: Setting, rounds: int, sides: Sequence[str] = tuple(SIDES)) -> list[Row]:
    """A row for each side: counts of the model as it is, and times of the model as it is or compiled."""
    rows: dict[str, Row] = {}
    held: dict[str, Training] = {}
    plain = Setting(setting.device, setting.dtype)
    for side in sides:
        try:
            made = training(side, SMALL[name], plain)
        except autocastfx.UnsupportedError as error:
            rows[side] = Row(name, side, note=f"not there yet: {str(error).splitlines()[0]}")
            continue
        rows[side] = Row(**counts(name, side, made, setting.device))
        if rounds:
            held[side] = training(side, SMALL[name], setting) if setting.is_compiled else made
    found = times(held, rounds, setting.device) if rounds else {}
    for side, (backward, step) in found.items():
        autocast, half = found.get(AUTOCAST), found.get(HALF)
        rows[side] = Row(
            **{
                **vars(rows[side]),
                "backward_ms": round(median(backward), 2),
                "step_ms": round(median(step), 2),
                "backward_to_autocast": ratios(backward, autocast and autocast[0]),
                "backward_to_half": ratios(backward, half and half[0]),
                "step_to_autocast": ratios(step, autocast and autocast[1]),
            }
        )
    return list(rows.values())


def _pairs(rows: Sequence[Row], side: str, other: str) -> list[tuple[Row, Row]]:
    held = {(row.model, row.side): row for row in rows if not row.note}
    models = dict.fromkeys(row.model for row in rows)
    return [(held[m, side], held[m, other]) for m in models if {(m, side), (m, other)} <= held.keys()]


def targets(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """What is aimed at and can be told from ``rows``: in words, with the figure, and whether it is reached."""
    found: list[tuple[str, bool]] = []

    def mean(what: str, values: Sequence[float], limit: float) -> None:
        if values:
            got = geometric_mean(values)
            spread = f"{min(values):.3f} to {max(values):.3f}"
            found.append((f"{what}: {got:.3f} in the geometric mean ({spread}), at most {limit}", got <= limit))

    def each(what: str, pairs: Sequence[tuple[Row, Row]], excess: Callable[[Row, Row], float], limit: float) -> None:
        if pairs:
            worst, at = max((excess(a, b), a.model) for a, b in pairs)
            found.append((f"{what}: {worst:.5g} ({at}), at most {limit}", worst <= limit))

    def ops(row: Row) -> int:
        return row.ops - row.gradient_casts

    to_half, to_autocast = _pairs(rows, FASTEST, HALF), _pairs(rows, FASTEST, AUTOCAST)
    each(
        f"{FASTEST}: activation casts beyond {HALF}'s",
        to_half,
        lambda a, b: a.activation_casts - b.activation_casts,
        6,
    )
    each(f"{FASTEST}: gradient casts of a weight", to_half, lambda a, b: a.gradient_casts / a.parameters, 1)
    each(f"{FASTEST}: bytes saved to {HALF}'s", to_half, lambda a, b: a.saved / b.saved, 1.02)
    each(f"{FASTEST}: operators but gradient casts to {HALF}'s", to_half, lambda a, b: ops(a) / ops(b), 1.02)
    timed = [a for a, _ in to_autocast if a.backward_to_autocast]
    mean(f"{FASTEST}: forward and backward to {AUTOCAST}", [a.backward_to_autocast[1] for a in timed], 0.95)
    mean(f"{FASTEST}: forward and backward to {HALF}", [a.backward_to_half[1] for a in timed], 1.04)
    mean(f"{FASTEST}: whole step to {AUTOCAST}", [a.step_to_autocast[1] for a in timed], 0.97)
    default = _pairs(rows, DEFAULT, AUTOCAST)
    mean(f"{DEFAULT}: cast bytes to {AUTOCAST}'s", [a.cast_bytes / b.cast_bytes for a, b in default], 0.8)
    slow = [(a, b) for a, b in default if a.backward_to_autocast]
    each(f"{DEFAULT}: forward and backward to {AUTOCAST}", slow, lambda a, _: a.backward_to_autocast[1], 1.02)
    return found


_HEADER = (
    f"{'':<35}|{'weight casts':>13}|{'gradient casts':>14}|{'other casts':>13}|{'':>7}|{'fwd + bwd':^35}|{'step':^22}\n"
    f"{'model':<13} {'side':<19} |{'':>4} {'MB':>8}|{'':>5} {'MB':>8}|{'':>4} {'MB':>8}|{'saved':>7}|"
    f"{'ms':>7} {'to autocast':>14} {'to half':>7} {'ops':>4}|{'ms':>7} {'to autocast':>14}"
)


def _line(row: Row) -> str:
    if row.note:
        return f"{row.model:<13} {row.side:<19} |{row.note}"

    def quartiles(found: Sequence[float]) -> str:
        return f"{found[1]:.2f} {found[0]:.2f}-{found[2]:.2f}" if found else "-"

    def number(found: float | None) -> str:
        return "-" if found is None else f"{found:.4g}"

    to_half = f"{row.backward_to_half[1]:.2f}" if row.backward_to_half else "-"
    return (
        f"{row.model:<13} {row.side:<19} |{row.weight_casts:>4} {row.weight_bytes / 1e6:>8.1f}"
        f"|{row.gradient_casts:>5} {row.gradient_bytes / 1e6:>8.1f}"
        f"|{row.activation_casts:>4} {row.activation_bytes / 1e6:>8.1f}|{row.saved / 1e6:>7.1f}"
        f"|{number(row.backward_ms):>7} {quartiles(row.backward_to_autocast):>14} {to_half:>7} {row.ops:>4}"
        f"|{number(row.step_ms):>7} {quartiles(row.step_to_autocast):>14}"
        + (f" peak {row.peak / 1e6:.0f} MB" if row.peak is not None else "")
    )


def table(rows: Sequence[Row]) -> str:
    """What is printed: the rows, and what is aimed at."""
    told = (f"{'reached' if reached else 'MISSED '}  {what}" for what, reached in targets(rows))
    return "\n".join([_HEADER, *map(_line, rows), "", *told])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(SMALL), help="separated by commas")
    parser.add_argument("--sides", default="|".join(SIDES), help="separated by |; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="0 counts alone; default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--compile", action="store_true", help="time the models under torch.compile")
    parser.add_argument("--json", type=Path, help="the store of rows")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in SMALL]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(SMALL)}")
    sides = options.sides.split("|")
    if unknown := [side for side in sides if side not in SIDES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {' | '.join(SIDES)}")
    if options.rounds == 1 or options.rounds < 0:
        parser.error("--rounds: quartiles need two or more; 0 counts alone")

    torch.set_num_threads(1)
    settings = {"rounds": options.rounds, "dtype": options.dtype, "compiled": options.compile}
    if sides != list(SIDES):
        settings["sides"] = sides
    if options.device == "cuda":
        settings["device"] = torch.cuda.get_device_name()
    store = Store(options.json, Row, settings)
    held = {row.model for row in store.rows}
    for name in names:
        if name in held:
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        setting = Setting(options.device, DTYPES[options.dtype], options.compile)
        store.extend(measure(name, setting, options.rounds, sides))
    print(table(store.rows))
    return int(not all(reached for _, reached in targets(store.rows)))


if __name__ == "__main__":
    sys.exit(main())
