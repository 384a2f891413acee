"""Time what the host does for a forward: models so small that kernels take next to nothing.

    python -m benchmarks.host_time [--models "BERT 12 layers"] [--rounds 15] [--json PATH]

Sides: the float32 model; the same under torch.autocast; converted, with casts and with working copies; and the
converted graph as a plain fx.GraphModule, which calls the same operators and nothing else. All in training mode, with
gradients on. The sides take turns, each round starting with another; a side's ratio is its time divided by the other's
in the same round: medians, with quartiles. Times are CPU time of the one thread.

The exit status is 1 if a median is above its limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn

from autocastfx import AmpModule
from benchmarks.models import FullModel, ResNet50
from benchmarks.store import Store
from benchmarks.timing import keep_memory, milliseconds, ratios, turns
from benchmarks.training import AUTOCAST, DEFAULT, FLOAT32, Setting, training

__all__ = ["MODELS", "Row", "main", "measured"]

CACHED, PLAIN = "cached, fold=exact", "plain graph"
SIDES = (FLOAT32, AUTOCAST, DEFAULT, CACHED, PLAIN)
LIMITS = ((DEFAULT, AUTOCAST, 1.0), (CACHED, DEFAULT, 1.0), (DEFAULT, PLAIN, 1.15), (CACHED, PLAIN, 1.15))
CALLS = 5  # of a side in its turn

_NARROW: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 12,
    "intermediate_size": 16,
}


class _MLP(nn.Module):
    def __init__(self, layers: int = 16, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x).mean(),)


def _tokens() -> dict[str, Tensor]:
    ids = torch.arange(8)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_NARROW, vocab_size=32))


def _vit() -> nn.Module:
    sizes: dict[str, Any] = {**_NARROW, "image_size": 16, "patch_size": 8, "num_labels": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def _images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.long)}


MODELS: dict[str, FullModel] = {
    "MLP 16 layers": FullModel(_MLP, lambda: {"x": torch.zeros(1, 16)}),
    "BERT 12 layers": FullModel(_bert, _tokens),
    "ViT 12 layers": FullModel(_vit, lambda: _images(1, 16)),
    "ResNet-50": FullModel(lambda: ResNet50(width=8, classes=4), lambda: _images(2, 32)),
}


@dataclass(frozen=True)
class Row:
    """A side of a model: milliseconds of a forward, and quartiles of its ratios over rounds, by the other side."""

    model: str
    side: str
    ms: float
    to: Mapping[str, Sequence[float]]


def measured(name: str, rounds: int) -> list[Row]:
    """A row for each side."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    calls = _calls(MODELS[name])
    for is_counted, side in turns(SIDES, rounds):
        call = calls[side]

        def several(call: Callable[[], object] = call) -> None:
            for _ in range(CALLS):
                call()

        taken = milliseconds(several, "cpu") / CALLS
        if is_counted:
            found[side].append(taken)
    others = {side: [other for one, other, _ in LIMITS if one == side] for side in SIDES}
    return [
        Row(name, side, round(median(times), 4), {other: ratios(times, found[other]) for other in others[side]})
        for side, times in found.items()
    ]


def _calls(full: FullModel) -> dict[str, Callable[[], object]]:
    setting = Setting("cpu", torch.bfloat16)
    made = {side: training(side, full, setting) for side in SIDES if side != PLAIN}
    amp_model: Any = made[DEFAULT].model
    return {**{side: one.forward for side, one in made.items()}, PLAIN: _plain(amp_model, made[DEFAULT].inputs)}


def _plain(amp_model: AmpModule, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
    """The graph of ``amp_model`` for the present mode, called as torch.fx does: it binds no call of the model."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(amp_model.graph, {}))
    module = fx.GraphModule(amp_model, graph)
    given = [inputs[str(node.target)] for node in graph.nodes if node.op == "placeholder"]
    return lambda: module(*given)


def above(rows: Sequence[Row]) -> list[str]:
    """The limits that are not kept, with the figures."""
    held = {(row.model, row.side): row for row in rows}
    found: list[str] = []
    for model in dict.fromkeys(row.model for row in rows):
        for side, other, limit in LIMITS:
            ratio = held[model, side].to[other][1]
            if ratio > limit:
                found.append(f"{model}: {side} takes {ratio:.3f} of {other}, more than {limit}")
    return found


def table(rows: Sequence[Row]) -> str:
    """A line for each side."""
    lines = ["model           side                  ms      of the other side, median (quartiles)"]
    for row in rows:
        shown = (f"{other} {q[1]:.3f} ({q[0]:.3f} to {q[2]:.3f})" for other, q in row.to.items())
        lines.append(f"{row.model:15} {row.side:20} {row.ms:7.3f}  {'; '.join(shown)}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="the store of rows")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if options.rounds < 2:
        parser.error("--rounds: quartiles need two or more")
    torch.set_num_threads(1)
    keep_memory()
    store = Store(options.json, Row, {"rounds": options.rounds})
    held = {row.model for row in store.rows}
    for name in (name for name in names if name not in held):
        print(f"{name} ...", file=sys.stderr, flush=True)
        store.extend(measured(name, options.rounds))
    print(table(store.rows))
    missed = above(store.rows)
    print("\n".join(missed) or "All limits are kept.")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
