"""Count and time a training step, against float32, torch.autocast and a model made 16-bit by hand.

    python -m benchmarks.train_step [--models "BERT 4x256"] [--rounds 0] [--processes 2] [--json PATH]
    python -m benchmarks.train_step --device cuda --dtype float16 --json PATH
    python -m benchmarks.train_step --compile --sides "float32|torch.autocast|cast, fold=exact|pure half"

One forward and backward after an update is counted: operators (without views and allocations), casts, and the bytes
that forward saves for backward, without parameters and their casts. Casts of weights, and casts that make a weight's
gradient, are counted separately.

Each round times forward and backward of each side with fresh working copies, and a whole step (forward, backward, fused
AdamW) that renews them. The sides take turns, and each round starts with another; a side's ratio is its time divided by
the other's in the same round: medians, with quartiles. CPU times are CPU time of the one thread, so that other
processes matter less; GPU times are synchronised wall time. float16 losses are scaled: by GradScaler under
torch.autocast, else by LossScalingOptimizer, with masters for the 16-bit model.

A side's memory addresses make it faster or slower for the life of its process, by 5 % and more. So each model is
measured in several processes, each of which builds another side first; the rounds of all count.

With ``--compile`` models are timed under torch.compile, and counted without it; each side takes half a minute and more
to compile.

With ``--json`` each model is written at once; models measured at the same commit are skipped. The exit status is 1 if
something is above a limit; compiled models have no limits.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from autocastfx.errors import UnsupportedError
from benchmarks.command import DTYPES, Command, settings_of, verdict
from benchmarks.models.small import SMALL
from benchmarks.step_counts import count
from benchmarks.step_table import Row, compiled_table, table, targets
from benchmarks.store import Store
from benchmarks.timing import keep_memory, milliseconds, ratios, turns
from benchmarks.training import AUTOCAST, HALF, SIDES, Setting, Training, training

WARM_UP = 2  # steps before anything is measured
ROUNDS, PROCESSES = 6, 2
Times = dict[str, tuple[list[float], list[float]]]  # by side: of forward and backward, and of a whole step


def counts(name: str, side: str, found: Training, device: str) -> dict[str, Any]:
    """Return the counted fields of a row."""
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


def times(sides: Mapping[str, Training], rounds: int, device: str) -> Times:
    """Return the milliseconds of each round."""
    found: Times = {name: ([], []) for name in sides}
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


def measure(
    name: str, setting: Setting, rounds: int, sides: Sequence[str] = tuple(SIDES)
) -> tuple[dict[str, Row], Times]:
    """Measure each side, in the order of building: counts of the eager model, and times of the eager or compiled one.

    Compiled code is dropped before the next model: after some compilations of the same function, the compiler would
    give up, which is an error here.
    """
    torch.compiler.reset()
    rows: dict[str, Row] = {}
    held: dict[str, Training] = {}
    plain = Setting(setting.device, setting.dtype)
    for side in sides:
        try:
            made = training(side, SMALL[name], plain)
        except UnsupportedError as error:
            rows[side] = Row(name, side, note=f"not there yet: {str(error).splitlines()[0]}")
            continue
        rows[side] = Row(**counts(name, side, made, setting.device))
        if rounds:
            held[side] = training(side, SMALL[name], setting) if setting.is_compiled else made
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        return rows, times(held, rounds, setting.device) if rounds else {}


def measured(name: str, setting: Setting, rounds: int, processes: int, sides: Sequence[str]) -> list[Row]:
    """Return a row for each side, measured in new processes or in this one, with the counts of the first."""
    if processes == 1:
        return _timed(*measure(name, setting, rounds, sides))
    orders = [(*sides[first:], *sides[:first]) for first in (n * len(sides) // processes for n in range(processes))]
    with multiprocessing.get_context("spawn").Pool(1, _one_thread, maxtasksperchild=1) as pool:
        (rows, found), *others = [pool.apply(measure, (name, setting, rounds, order)) for order in orders]
    for _, more in others:
        found = {side: (a + more[side][0], b + more[side][1]) for side, (a, b) in found.items()}
    return _timed({side: rows[side] for side in sides}, found)


def _one_thread() -> None:
    torch.set_num_threads(1)
    keep_memory()


def _timed(rows: dict[str, Row], found: Times) -> list[Row]:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    command = Command("train_step", __doc__)
    command.names("--models", SMALL)
    command.names("--sides", SIDES, separator="|")
    command.number("--rounds", ROUNDS, 0)  # of a process; 0 counts alone
    command.number("--processes", PROCESSES)
    command.device()
    command.add_argument("--compile", action="store_true", help="time the models under torch.compile")
    options = command.begin(arguments, is_timed=True)
    if options.rounds == 1:
        command.error("--rounds: quartiles need two or more; 0 counts alone")
    processes = options.processes if options.rounds else 1
    settings = {**settings_of(options, "rounds", "dtype"), "compiled": options.compile, "processes": processes}
    if options.sides != list(SIDES):
        settings["sides"] = options.sides
    store = Store(options.json, Row, settings)
    setting = Setting(options.device, DTYPES[options.dtype], options.compile)
    store.fill(options.models, "model", lambda name: measured(name, setting, options.rounds, processes, options.sides))
    if options.compile:
        return verdict(compiled_table(store.rows))
    print(table(store.rows))
    return int(not all(reached for _, reached in targets(store.rows)))


if __name__ == "__main__":
    sys.exit(main())
