"""Time a training step compiled by Inductor: converted by the backend, beside torch.compile under torch.autocast.

    python -m benchmarks.compiled_step [--models "BERT 4x256"] [--rounds 10] [--json PATH]

Forward and backward in bfloat16 on the CPU, without dropout. The two sides take turns in one process, and each round
starts with the other; times are CPU time of the one thread, ratios those of a round: medians, with quartiles. A side's
memory addresses make it faster or slower for the life of its process, by more than the rounds of one process tell. So
there are several processes, which take turns in the side that they build first: six for what returns the loss, and for
the control; two for what returns all outputs. A geometric mean is of the medians of all processes and models, with its
standard error by how the processes of a model differ. Each side takes half a minute and more to compile, which no
figure holds. Distances are those of all gradients as one vector from float32's, by its length.

Each model is measured three times: it returns the loss alone, then all its outputs, and in the control both sides are
torch.autocast, which shows how exact the times are. Of all outputs the backend gives logits in float32, as the model
does, where torch.autocast gives 16 bits. Bytes are those that Inductor's kernels read and write in one step, by its own
count; what it does not compile has none.

The exit status is 1 if a geometric mean of the ratios is above 1 (the control aside), or a model's gradients are more
than 1.2 times as far from float32 as torch.autocast's.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import multiprocessing
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, variance
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from benchmarks.command import Command, settings_of, verdict
from benchmarks.judge import distance
from benchmarks.models.families import STILL_BERT, STILL_GPT2, FullModel, ResNet
from benchmarks.models.small import CLASSES, VOCABULARY, small_bert, small_gpt2, small_images, small_llama, small_tokens
from benchmarks.store import Store
from benchmarks.timing import keep_memory, ratios, spread, timed

LOW = torch.bfloat16
AUTOCAST, BACKEND = "torch.autocast", "backend"
SIDES = (AUTOCAST, BACKEND)
CONTROL = "control"
PROCESSES = {"loss": 6, "all": 2, CONTROL: 6}  # by what is returned
FARTHER = 1.2


class LossAlone(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> tuple[Tensor]:
        return (self.model(**inputs)[0],)


class Tagger(nn.Module):
    """Two bidirectional LSTM layers and a class for each token."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.layers(self.table(input_ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % CLASSES), logits


MODELS: dict[str, FullModel] = {
    "BERT 4x256": FullModel(partial(small_bert, **STILL_BERT), small_tokens),
    "GPT-2 4x256": FullModel(partial(small_gpt2, **STILL_GPT2), small_tokens),
    "Llama 4x256": FullModel(small_llama, small_tokens),
    "ResNet-18 112": FullModel(lambda: ResNet((2, 2, 2, 2), classes=CLASSES), lambda: small_images(112)),
    "LSTM tagger 2x128": FullModel(Tagger, small_tokens),
}


@dataclass(frozen=True)
class Row:
    """A model: milliseconds of each side, quartiles of the ratio, and distances of the gradients from float32's.

    Attributes:
        returned: what the model returns, a key of ``PROCESSES``; of the control the loss alone.
        autocast_bytes: that Inductor's kernels read and write in one step.
        graphs: of the backend.
        told: code that the backend's model does not run converted.
        by_process: the median ratio of each process.
    """

    model: str
    returned: str
    autocast_ms: float
    backend_ms: float
    ratio: Sequence[float]
    autocast_distance: float
    backend_distance: float
    autocast_bytes: int
    backend_bytes: int
    graphs: int
    told: Sequence[str]
    by_process: Sequence[float] = ()


Times = dict[str, list[float]]


def measured(
    name: str, returned: str, rounds: int, order: Sequence[str] = SIDES, *, counts: bool = True
) -> tuple[Row, Times]:
    """Measure a model in this process, and also return the times of each round.

    Args:
        name: of the model.
        returned: what the model returns.
        rounds: how many.
        order: in which the sides are built.
        counts: count the bytes, for which Inductor compiles anew what it has in its caches.
    """
    torch.set_num_threads(1)
    keep_memory()
    torch.manual_seed(0)
    full = MODELS[name]
    model, inputs = full.build().train(), full.inputs()
    model = model if returned == "all" else LossAlone(model)
    exact = _gradients(model, lambda: model(**inputs), under_autocast=False)
    backend = autocastfx.CompileBackend(dtype=LOW)
    steps: dict[str, Callable[[], Tensor]] = {}
    found: dict[str, list[int]] = {}
    for side in order:
        twin = copy.deepcopy(model)
        is_ours = side == BACKEND and returned != CONTROL
        called: Any = backend.compile(twin) if is_ours else torch.compile(twin, backend=_inductor())
        steps[side] = partial(_gradients, twin, partial(called, **inputs), under_autocast=not is_ours)
        with _bytes_counted() if counts else contextlib.nullcontext([0]) as found[side]:
            for _ in range(2):  # code that is skipped runs otherwise from the second call on
                steps[side]()
    apart = {side: distance(step(), exact) for side, step in steps.items()}
    times = timed({side: steps[side] for side in SIDES}, rounds)
    told = [*map(str, backend.skipped), *(graph.failure for graph in backend.graphs if graph.failure)]
    told = [one.replace(f"{Path(__file__).resolve().parents[1]}/", "") for one in told]
    moved = [sum(found[side]) for side in SIDES]
    row = Row(name, returned, 0.0, 0.0, (), apart[AUTOCAST], apart[BACKEND], *moved, len(backend.graphs), told)
    return _with_times(row, times), times


def _with_times(row: Row, times: Times) -> Row:
    theirs, ours = times[AUTOCAST], times[BACKEND]
    return replace(
        row, autocast_ms=round(median(theirs), 2), backend_ms=round(median(ours), 2), ratio=ratios(ours, theirs)
    )


def _gradients(model: nn.Module, call: Callable[[], Any], *, under_autocast: bool) -> Tensor:
    """Run forward and backward; the gradients as one vector share no memory with those of the next step."""
    model.zero_grad()
    with torch.autocast("cpu", LOW) if under_autocast else contextlib.nullcontext():
        loss = call()[0]
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _inductor() -> Any:
    """Return a backend of its own, because Dynamo shares compiled code between models with the same one."""
    from torch._inductor.compile_fx import compile_fx

    return partial(compile_fx)


@contextlib.contextmanager
def _bytes_counted() -> Generator[list[int]]:
    """Give a list of the bytes that the kernels move in one step, which is filled when the context ends.

    Inductor counts where its log of metrics is on, and not for what it finds in its caches.
    """
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx, config, metrics

    log: logging.Logger = compile_fx.inductor_metrics_log
    before, level, is_passed_on = metrics.num_bytes_accessed, log.level, log.propagate
    counted: list[int] = []
    try:
        log.setLevel(logging.INFO)
        log.propagate = False
        with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
            yield counted
        counted.append(metrics.num_bytes_accessed - before)
    finally:
        log.setLevel(level)
        log.propagate = is_passed_on


def _in_processes(name: str, returned: str, rounds: int) -> Row:
    """Measure a model in processes of which each builds another side first than the one before."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = [
            pool.apply(measured, (name, returned, rounds, SIDES[:: -1 if turn % 2 else 1]), {"counts": not turn})
            for turn in range(PROCESSES[returned])
        ]
    return _of_processes(found[0][0], [times for _, times in found])


def _of_processes(row: Row, taken: Sequence[Times]) -> Row:
    """The row with the times of all processes."""
    together = {side: [time for times in taken for time in times[side]] for side in SIDES}
    return replace(_with_times(row, together), by_process=[_with_times(row, times).ratio[1] for times in taken])


def means(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the geometric mean of the ratios and its standard error, by what the models return."""
    found: dict[str, tuple[float, float]] = {}
    for returned in dict.fromkeys(row.returned for row in rows):
        logs = [[math.log(ratio) for ratio in row.by_process] for row in rows if row.returned == returned]
        variances = [variance(one) / len(one) for one in logs if len(one) > 1]
        found[returned] = math.exp(mean(map(mean, logs))), math.sqrt(sum(variances)) / len(logs)
    return found


def table(rows: Sequence[Row]) -> str:
    """A line for each model, and the geometric means."""
    lines = [
        "model             returns autocast ms backend ms  ratio (quartiles)       MB: autocast, backend"
        "  gradients off: autocast, backend"
    ]
    for row in rows:
        lines.append(
            f"{row.model:17} {row.returned:7} {row.autocast_ms:11.1f} {row.backend_ms:10.1f}  "
            f"{spread(row.ratio, 3)}  {row.autocast_bytes / 1e6:12.1f}, {row.backend_bytes / 1e6:7.1f}"
            f"  {row.autocast_distance:.2e}, {row.backend_distance:.2e}"
        )
    told = dict.fromkeys(f"not converted: {row.model}: {one}" for row in rows for one in row.told)
    for returned, (ratio, error) in means(rows).items():
        if returned == CONTROL:
            lines.append(f"control  geometric mean of the ratios, both sides torch.autocast: {ratio:.4f} ± {error:.4f}")
            continue
        said = "reached" if ratio <= 1 else "MISSED "
        lines.append(f"{said}  geometric mean of the ratios, {returned} returned: {ratio:.4f} ± {error:.4f}; at most 1")
    return "\n".join([*lines, *told])


def missed(rows: Sequence[Row]) -> list[str]:
    """Return what is above a limit, with the figures."""
    of_all = means([row for row in rows if row.returned != CONTROL])
    above = [f"the geometric mean, {key} returned, is {ratio:.4f}" for key, (ratio, _) in of_all.items() if ratio > 1]
    return above + [
        f"{row.model}: gradients are {row.backend_distance / row.autocast_distance:.2f} times as far off"
        for row in rows
        if row.backend_distance > FARTHER * row.autocast_distance
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    command = Command("compiled_step", __doc__)
    command.names("--models", MODELS)
    command.rounds(10)
    options = command.begin(arguments)
    store = Store(options.json, Row, settings_of(options, "rounds"))
    asked = ((name, returned) for returned in PROCESSES for name in options.models)
    store.fill(asked, "model returned", lambda pair: [_in_processes(*pair, options.rounds)])
    return verdict(table(store.rows), missed(store.rows))


if __name__ == "__main__":
    sys.exit(main())
