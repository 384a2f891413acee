"""What float8 costs in accuracy, and what choosing product by product gains over the usual rules, on small models.

    python -m benchmarks.float8 [--models "GPT-2*"] [--json PATH]
    python -m benchmarks.float8 --probes 64

Each model is trained for 60 steps in float32 first (MiniLM comes trained, and is fine-tuned). The sensitivity of the
gradient to float8, recipe ``rowwise``, is measured on four batches with 8 probes each, and plans are chosen by it. All
is judged on three batches that neither training nor tuning has seen: the relative error of the gradient against
float32. Products are emulated, in float32 of the float8 numbers.

- ``bfloat16``: the default list. ``all``: all linears in float8 whose sizes are multiples of 16.
- ``but last``, ``blocks``, ``mlp``: the rules that are usual with torchao: all linears but the last; none in the first
  and the last block nor outside of blocks; those of the MLPs alone. Of each, the share of operations in float8 and the
  error; then the error of ``tune(float8=True, share=...)`` at that share at least.
- ``singles``: single products in float8, all else in float32: the least and the largest ratio of the predicted to the
  true error, both of the first judged batch, and the correlation of their logarithms. 16 probes predict an error with
  a deviation of 18 % by chance; with ``--probes`` single products alone are predicted, by so many.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import AmpModule, OpList, Sensitivity
from autocastfx.graph.node import argument
from autocastfx.numerics.compare import TargetDistance
from autocastfx.plan.plan import PlannedNode
from autocastfx.plan.sensitivity import rms
from autocastfx.policy.float8 import OPERANDS
from autocastfx.runtime.operators.float8 import float8_linear
from benchmarks.command import Command, verdict
from benchmarks.models import tuned
from benchmarks.models.families import STILL_BERT, STILL_GPT2, bert, gpt2, llama, t5
from benchmarks.models.tasks import ALPHABET, DigitsViT, ViT
from benchmarks.models.tuned import CONTEXT, Case, trained
from benchmarks.store import Store

STEPS, MEASURED, HELD_OUT, JUDGED, SINGLES, PROBES = 60, 4, 1, 3, 24, 16
RECIPE, LOW, WIDTH, LAYERS = "rowwise", torch.bfloat16, 128, 4
OPS = ("linear", "addmm")
_MLP = re.compile(r"\.mlp\b|intermediate|(?<!attention)\.output\.dense|DenseReluDense|\.channels\b")
_BLOCK = re.compile(r"^(.*?)\.(\d+)\.")

# Models of four blocks. The vocabulary is a multiple of 16, so that the head may run in float8.

_SIZES = (WIDTH, LAYERS, 4, 128)
assert len(ALPHABET) < _SIZES[-1]


class _Mlp(nn.Sequential):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class _MixerBlock(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens, self.channels = _Mlp(tokens, 64), _Mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class _Mixer(nn.Module):
    """MLP-Mixer on 8 x 8 images in patches of 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.blocks = nn.Sequential(*(_MixerBlock(16) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class _RecurrentBlock(nn.Module):
    """A gated linear recurrence (minGRU, L. Feng et al., 2024), and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gates, self.out, self.mlp = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), _Mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, new = self.gates(self.norm1(x)).chunk(2, -1)
        gate = gate.sigmoid()
        state, states = torch.zeros_like(new[:, 0]), list[Tensor]()
        for t in range(x.shape[1]):
            state = state + gate[:, t] * (new[:, t] - state)
            states.append(state)
        x = x + self.out(torch.stack(states, 1))
        return x + self.mlp(self.norm2(x))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, WIDTH)
        self.blocks = nn.Sequential(*(_RecurrentBlock() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.table(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _short(seed: int) -> Iterator[dict[str, Tensor]]:
    return ({name: t[:, :16].contiguous() for name, t in batch.items()} for batch in tuned.text(seed))


def _of_digits(build: Any) -> Case:
    task = DigitsViT(steps=10_000, batch=32, rate=1e-3)
    return Case(build, task.batches, lambda out, batch: task.loss(out, batch[1]), lambda batch: batch[0])


_LLAMA = {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
_GPT2 = {"n_positions": CONTEXT, "bos_token_id": None, "eos_token_id": None, **STILL_GPT2}
MODELS: dict[str, Case] = {
    "Llama 4x128": Case(partial(llama, *_SIZES[:3], 352, 128, **_LLAMA), tuned.text),
    "GPT-2 4x128": Case(partial(gpt2, *_SIZES, **_GPT2), tuned.text),
    "ViT 4x128": _of_digits(lambda: ViT(WIDTH, LAYERS)),
    "MiniLM 6x384": tuned.MODELS["MiniLM 6x384"],
    "BERT 4x128": Case(partial(bert, *_SIZES, **STILL_BERT, use_cache=False), tuned.masked),
    "T5 4+4x128": Case(partial(t5, *_SIZES, dropout_rate=0.0, num_decoder_layers=LAYERS), tuned.text),
    "Mixer 4x128": _of_digits(_Mixer),
    "minGRU 4x128": Case(_Recurrent, _short),
}

# The usual rules, by the paths of modules.


def rules(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return, by rule, the paths that it leaves in 16 bits, of those of all linears, in the order of the call."""
    blocks = {path: (match[1], int(match[2])) for path in paths if (match := _BLOCK.match(path))}
    ends: dict[str, list[int]] = {}
    for stack, number in blocks.values():
        ends.setdefault(stack, []).append(number)
    inner = [p for p, (stack, n) in blocks.items() if min(ends[stack]) < n < max(ends[stack])]
    return {
        "but last": [paths[-1]],
        "blocks": [path for path in paths if path not in inner],
        "mlp": [path for path in paths if not _MLP.search(path)],
    }


def without(paths: Sequence[str]) -> OpList:
    """Return the list of all linears in float8 but those in modules."""
    modules = [{"path": path, "float8": False} for path in paths]
    return OpList.of({"float8": [{"ops": list(OPS), "recipe": RECIPE, "emulate": True}], "modules": modules})


# Measure.


@dataclass(frozen=True)
class Row:
    """The results of one model: errors of the gradient.

    Attributes:
        bfloat16, all: of the default list, and of all linears in float8.
        rules: by rule, its share of operations, its error, and what is predicted of it.
        tuned: the same of the plans tuned at these shares.
        singles: of single products, the predicted and the true error.
        seconds: the time that this row took.
    """

    model: str
    bfloat16: float
    all: float
    rules: dict[str, list[float]]
    tuned: dict[str, list[float]]
    singles: list[list[float]]
    seconds: float


@dataclass(frozen=True)
class Bench:
    """A model that was trained for a while, and what a product in float8 does to its gradients."""

    model: nn.Module
    case: Case
    judge: TargetDistance
    found: Sensitivity
    batches: Sequence[Any]

    def converted(self, *lists: OpList | str, dtype: str = "bfloat16") -> AmpModule:
        args, kwargs = self.case.arguments(self.batches[0])
        return autocastfx.convert(
            self.model, args, kwargs or None, dtype=dtype, op_list=lists, sensitivity=self.found, check=False
        )

    def paths(self) -> list[str]:
        """The modules of all products that can run in float8, in the order of the call."""
        nodes = self.converted("default", without([])).plan.nodes
        return [node.module for node in nodes if node.float8 is not None and node.float8.products]

    def tuned(self, share: float) -> OpList:
        """The list that ``tune`` finds for a share of operations."""
        given = {**_options(self.case), "op_list": ("default", without([])), "sensitivity": self.found}
        return autocastfx.tune(self.model, self.batches, self.case.loss, share=share, **given).op_list

    def judged(self, amp_model: AmpModule) -> list[float]:
        return [self.share(amp_model.plan.nodes), self.judge(amp_model, LOW), amp_model.plan.error or 0.0]

    def share(self, nodes: Sequence[PlannedNode]) -> float:
        effects = {effect.key: effect for effect in self.found.effects if effect.products}
        known = [(n, effects[n.name, n.op, n.module]) for n in nodes if (n.name, n.op, n.module) in effects]
        ran = sum(e.flops * len(set(n.float8.products) & set(e.products)) for n, e in known if n.float8 is not None)
        return ran / sum(e.flops * len(e.products) for _, e in known)

    def single(self, name: str, product: str) -> float:
        """The true error of one product in float8, all else in float32, on the first judged batch."""
        amp_model = self.converted("float32")
        for variant in amp_model.variants:
            for node in (node for node in variant.graph.nodes if node.name == name):
                operands = OPERANDS[next(n.op for n in variant.plan.nodes if n.name == name)]
                x, weight, bias = (argument(node, word) for word in (operands.input, operands.weight, operands.bias))
                if operands.transposes:
                    with variant.graph.inserting_before(node):
                        weight = variant.graph.call_function(torch.ops.aten.t.default, (weight,))
                node.target, node.kwargs = float8_linear, {}
                node.args = (x, weight, bias, [], [], [], [], RECIPE, product, True)
        amp_model.recompile()
        given = (self.case.loss, "gradient", self.case.inputs)
        return TargetDistance(self.model, self.judge.batches[:1], *given)(amp_model, LOW)


def _options(case: Case) -> dict[str, Any]:
    return {"inputs": case.inputs, "dtype": "bfloat16", "float8": RECIPE, "progress": False}


def prepared(case: Case) -> Bench:
    """Train a model, and measure how much its gradient changes by each product in float8."""
    model = trained(case, STEPS)
    fresh = list(itertools.islice(case.batches(1), MEASURED + HELD_OUT + JUDGED))
    first, judged = fresh[: MEASURED + HELD_OUT], fresh[MEASURED + HELD_OUT :]
    found = autocastfx.sensitivity(model, first[:MEASURED], case.loss, **_options(case))
    return Bench(model, case, TargetDistance(model, judged, case.loss, "gradient", case.inputs), found, first)


def singles(bench: Bench, probes: int) -> list[list[float]]:
    """Return the predicted and the true error of some single products, of the first judged batch."""
    case = bench.case
    there = autocastfx.sensitivity(
        bench.model, bench.judge.batches[:1], case.loss, **{**_options(case), "probes": probes}
    )
    products = [(e.name, p) for e in there.effects for p in e.products]
    chosen = random.Random(0).sample(products, min(SINGLES, len(products)))
    return [[rms(there[n].products[p]), bench.single(n, p)] for n, p in chosen]


def measure(name: str) -> Row:
    """Measure one model."""
    started = time.perf_counter()
    bench = prepared(MODELS[name])
    every = bench.converted("default", without([]))
    by_rule, tuned = dict[str, list[float]](), dict[str, list[float]]()
    for rule, left in rules(bench.paths()).items():
        by_rule[rule] = bench.judged(bench.converted("default", without(left)))
        tuned[rule] = bench.judged(bench.converted(bench.tuned(by_rule[rule][0])))
    predicted = singles(bench, PROBES)
    bfloat16 = bench.judge(bench.converted("default"), LOW)
    seconds = time.perf_counter() - started
    return Row(name, bfloat16, bench.judge(every, LOW), by_rule, tuned, predicted, seconds)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table, with what is above or below its mark."""
    names = list(dict.fromkeys(rule for row in rows for rule in row.rules))
    title = f"{'model':14}{'bfloat16':>10}{'all':>8}" + "".join(f"{f'{n}: share, error, tuned':>33}" for n in names)
    lines = [title + f"{'singles':>13}{'log-corr.':>11}"]
    for row in rows:
        cells = ""
        for rule in names:
            (share, error, _), tuned = row.rules[rule], row.tuned[rule][1]
            cells += f"{f'{share:.0%}  {error:.4f}  {tuned:.4f} ({tuned / error:.2f})':>33}"
        ratios = [predicted / true for predicted, true in row.singles]
        span = f"{min(ratios):.2f}-{max(ratios):.2f}"
        lines.append(
            f"{row.model:14}{row.bfloat16:>10.4f}{row.all:>8.4f}{cells}{span:>13}{_correlation(row.singles):>11.3f}"
        )
    return "\n".join([*lines, "", *_marks(rows)])


def _correlation(pairs: Sequence[Sequence[float]]) -> float:
    return statistics.correlation(*map(list, zip(*(map(math.log, pair) for pair in pairs), strict=True)))


def _marks(rows: Sequence[Row]) -> Iterator[str]:
    below = [row.tuned["blocks"][1] / row.rules["blocks"][1] for row in rows]
    yield f"Tuned at most 0.6 of the error of `blocks` at its share: {sum(one <= 0.6 for one in below)} of {len(rows)}."
    ratios = [predicted / true for row in rows for predicted, true in row.singles]
    near = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
    yield f"Single products predicted within 1.5 times: {near} of {len(ratios)}."
    yield f"Log-correlation at least 0.95: {sum(_correlation(row.singles) >= 0.95 for row in rows)} of {len(rows)}."
    plans: list[Mapping[str, list[float]]] = [part for row in rows for part in (row.rules, row.tuned)]
    whole = [predicted / error for part in plans for _, error, predicted in part.values()]
    yield f"Whole plans, predicted over true errors: {min(whole):.2f}-{max(whole):.2f}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models chosen, and print the table."""
    command = Command("float8", __doc__)
    command.add_argument("--models", default="*", help="a glob of names")
    command.add_argument("--probes", type=int, help="predict single products alone, by so many probes")
    chosen = command.begin(arguments)
    warnings.simplefilter("ignore")
    there = {name for name in MODELS if name in tuned.available() or name not in tuned.MODELS}
    store = Store(chosen.json, Row, {"transformers": transformers.__version__, "recipe": RECIPE})
    names = [name for name in fnmatch.filter(MODELS, chosen.models) if name in there]
    if chosen.probes is not None:
        for name in names:
            pairs = singles(prepared(MODELS[name]), chosen.probes)
            ratios = [predicted / true for predicted, true in pairs]
            near = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
            span, correlation = f"{min(ratios):.2f}-{max(ratios):.2f}", _correlation(pairs)
            print(f"{name:14}{near:>4} of {len(pairs)} within 1.5{span:>13}{correlation:>11.3f}", flush=True)
        return 0
    store.fill(names, "model", lambda name: [measure(name)])
    return verdict(table(store.rows))


if __name__ == "__main__":
    sys.exit(main())
