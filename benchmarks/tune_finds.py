"""Whether ``tune`` finds unaided what is known to need float32, where no rule protects it.

    python -m benchmarks.tune_finds

- ``positions``: positions up to 4096, times inverse frequencies, for the sines and cosines of rotary attention. The
  product, or what reads it, must not be in 16 bits.
- ``planted``: 512 added to a hidden value and taken away again: between the two, 16 bits hold little of the value.
- ``stream``: the residual stream of a pre-norm model of 24 blocks. Its sums must not be in 16 bits.

All start from a list that allows 16 bits wherever the bfloat16 list denies or infers, and makes no demands. The budget
is an error of a twentieth of the start's, and for the stream of half of the start's. It is found if all the named ops
run in float32 in the tuned plan, none of them because of a rule that measurement may not change, and if that plan has
at least twice the error with these ops in 16 bits.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import OpList
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.plan_search import Budget
from autocastfx.plan.plan import Forced, PlannedNode, Precision
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category

__all__ = ["FINDS", "Find", "Found", "found", "main", "unprotected"]

WIDTH, WORDS, WARM_UP, BATCHES, WINDOW = 32, 64, 40, 4, 64
_OPEN = (Category.DENY, Category.INFER)

Batch = tuple[tuple[Tensor, ...], Tensor]  # what the model takes, and the targets


def unprotected() -> OpList:
    """The bfloat16 list with ``allow`` for ``deny`` and ``infer``, and without demands; measurement may change it."""
    start = load_op_list("bfloat16")

    def opened(rule: Any) -> Any:
        return replace(rule, category=Category.ALLOW) if rule.category in _OPEN else rule

    rules = {name: opened(rule) for name, rule in start.rules.items()}
    conditional = {key: opened(rule) for key, rule in start.conditional.items()}
    return replace(start, rules=rules, conditional=conditional, demands={}, name="unprotected")


class Angles(nn.Module):
    """The sines and cosines of positions times inverse frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.frequencies
        return angles.sin(), angles.cos()


class Rotary(nn.Module):
    """Rotary attention in windows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.angles = nn.Embedding(WORDS, WIDTH), Angles()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        sines, cosines = self.angles(positions)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            both = (first * cosines - second * sines, second * cosines + first * sines)
            return torch.cat(both, dim=-1).unflatten(0, (-1, WINDOW))

        x = self.table(tokens)
        values = self.value(x).unflatten(0, (-1, WINDOW))
        heads = F.scaled_dot_product_attention(turned(self.query(x)), turned(self.key(x)), values, is_causal=True)
        return self.head(x + self.out(heads.flatten(0, 1)))


class Planted(nn.Module):
    """Loses the last digits of what it gets, where the sum is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 512.0) - 512.0


def _planted() -> nn.Module:
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), Planted(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers)


class Block(nn.Module):
    """Adds to the stream what it makes of the normed stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _deep(depth: int = 24) -> nn.Module:
    ends = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(ends[0], nn.Sequential(*(Block() for _ in range(depth))), *ends[1:])


def _positions(seed: int, length: int = 4096) -> Iterator[Batch]:
    """Random tokens, each to be found again two places later."""
    return (((tokens, torch.arange(float(length))), tokens.roll(2)) for tokens in _tokens(seed, length))


def _words(seed: int, length: int = 256) -> Iterator[Batch]:
    """Random tokens, each with the one that is its number in a fixed order."""
    order = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    return (((tokens,), order[tokens]) for tokens in _tokens(seed, length))


def _tokens(seed: int, length: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(WORDS, (length,), generator=generator)


def _loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch[1])


@dataclass(frozen=True)
class Find:
    """What is to be found.

    Attributes:
        build: makes the model.
        batches: of a seed.
        is_named: whether a node must run in float32.
        error: the budget, as a share of the start's error.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    is_named: Callable[[PlannedNode], bool]
    error: float


FINDS = {
    "positions": Find(Rotary, _positions, lambda node: node.module == "angles" and node.op == "mul", 0.05),
    "planted": Find(_planted, _words, lambda node: node.module == "3" and node.op == "add", 0.05),
    "stream": Find(_deep, _words, lambda node: node.op == "add", 0.5),
}


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        named: the number of nodes that must run in float32.
        kept: how many of them do, by measurement.
        alone: the largest error that one of them has alone in 16 bits, as predicted.
        others: the largest of all other nodes.
        start, tuned, rounded: the true errors of the start, of the tuned plan, and of that with these nodes in 16 bits.
        bytes: of the tuned plan, over the start's.
    """

    named: int
    kept: int
    alone: float
    others: float
    start: float
    tuned: float
    rounded: float
    bytes: float

    @property
    def is_found(self) -> bool:
        """True if all of them run in float32, and would cost at least the error of all else in 16 bits."""
        return self.kept == self.named > 0 and self.rounded >= 2 * self.tuned


def found(find: Find) -> Found:
    """Train a model for some steps in float32, tune it, and judge the plan on batches that tuning has not seen."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = find.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for batch in itertools.islice(find.batches(0), WARM_UP):
        optimizer.zero_grad()
        _loss(model(*batch[0]), batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    fresh = list(itertools.islice(find.batches(1), 2 * BATCHES))
    judge = TargetDistance(model, fresh[BATCHES:], _loss, "gradient", _inputs)
    given = fresh[0][0]

    def error(amp_model: nn.Module) -> float:
        return judge(amp_model, torch.bfloat16)

    start = autocastfx.convert(model, given, dtype="bfloat16", op_list=unprotected())
    tuned = autocastfx.tune(
        *(model, fresh[:BATCHES], _loss),
        budget=Budget(error=find.error * error(start)),
        dtype="bfloat16",
        op_list=unprotected(),
        inputs=_inputs,
        progress=False,
    )
    amp_model = tuned.convert(model, given)
    named = {node.name for node in amp_model.plan.nodes if find.is_named(node)}
    nodes = tuple(_low(node) if node.name in named else node for node in amp_model.plan.nodes)
    rounded = tuned.convert(model, given, plan=replace(amp_model.plan, nodes=nodes))
    errors = {effect.name: effect.error for effect in tuned.sensitivity.effects}
    kept = [node for node in amp_model.plan.nodes if node.name in named and _is_kept(node)]
    return Found(
        named=len(named),
        kept=len(kept),
        alone=max(errors[name] for name in named),
        others=max(error for name, error in errors.items() if name not in named),
        start=error(start),
        tuned=error(amp_model),
        rounded=error(rounded),
        bytes=amp_model.plan.traffic.moved / start.plan.traffic.moved,
    )


def _inputs(batch: Batch) -> tuple[Tensor, ...]:
    return batch[0]


def _low(node: PlannedNode) -> PlannedNode:
    low = Precision.LOW
    return replace(node, placement=replace(node.placement, run=low, store=low, as_stored=()))


def _is_kept(node: PlannedNode) -> bool:
    return node.placement.run is Precision.FLOAT32 and not isinstance(node.decision.source, Forced)


def main() -> int:
    """Print what is found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = True
    for name, find in FINDS.items():
        one = found(find)
        every &= one.is_found
        print(
            f"{name}: {'found' if one.is_found else 'NOT found'}. {one.kept} of {one.named} in float32 by measurement; "
            f"one alone in 16 bits: predicted error {one.alone:.1e}, of other ops at most {one.others:.1e}.\n"
            f"  error: start {one.start:.1e}, tuned {one.tuned:.1e} at {one.bytes:.2f} of the bytes, "
            f"tuned with these in 16 bits {one.rounded:.1e}"
        )
    return 0 if every else 1


if __name__ == "__main__":
    sys.exit(main())
