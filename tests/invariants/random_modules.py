"""Modules drawn at random from a grammar: operators, views, writes in place, reductions with dtypes, buffers.

    python -m tests.invariants.random_modules [--count 200]

converts each at every level of folding and with every way of holding weights, and prints those that are farther from
float32 than they may be, or that fail. A test draws fewer.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from tests.invariants.pair import distance, roundings

__all__ = ["FOLDS", "WEIGHTS", "RandomModule", "fault"]

WIDTH = 16
FOLDS = ("none", "exact", "kernel")
WEIGHTS = ("cast", "cached", "low")
Step = Callable[["RandomModule", int, list[Tensor], Random], Tensor]


def _recent(values: list[Tensor], random: Random) -> Tensor:
    return values[max(0, len(values) - 1 - random.randrange(3))]


def _linear(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    return module.layers[i](values[-1])


def _activate(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    return random.choice((F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus))(values[-1])


def _normalise(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    return module.norms[i](values[-1])


def _attend(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    y, scores = values[-1], values[-1] @ _recent(values, random).transpose(1, 2) / WIDTH
    return torch.softmax(scores, -1) @ module.layers[i](y)


def _add(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    return values[-1] + 0.5 * _recent(values, random)


def _gate(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    return values[-1] * torch.sigmoid(_recent(values, random)) * module.scales[i]


def _centre(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    return _recent(values, random) - 0.5 * values[-1].mean(random.choice((1, 2)), keepdim=True)


def _sum(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    dtype = random.choice((None, torch.float32, torch.float64))
    return values[-1] + (0.1 * values[-1].sum(1, keepdim=True, dtype=dtype)).to(torch.float32)


def _in_place(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    y = values[-1] * 1.0
    return random.choice((lambda: y.add_(_recent(values, random)), lambda: y.mul_(0.7), lambda: y.relu_()))()


def _assign(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    y = values[-1].clone()
    y[:, :, : WIDTH // 2] = _recent(values, random)[:, :, WIDTH // 2 :]
    return y


def _view(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    y = values[-1]
    return random.choice(
        (
            lambda: y.reshape(y.shape[0], -1, 2, WIDTH // 2).transpose(2, 3).flatten(2),
            lambda: y.flip(1),
            lambda: torch.cat(y.chunk(2, -1)[::-1], -1),
            lambda: y.unsqueeze(0).expand(2, -1, -1, -1)[1],
        )
    )()


def _join(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    joined = torch.cat([values[-1], _recent(values, random)], -1)
    return module.layers[i](joined[..., ::2])


def _mask(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    hidden = torch.arange(WIDTH) < WIDTH // 2
    return random.choice(
        (lambda: values[-1].masked_fill(hidden, 0.0), lambda: torch.where(hidden, values[-1], _recent(values, random)))
    )()


def _remember(module: RandomModule, i: int, values: list[Tensor], random: Random) -> Tensor:
    state = module.get_buffer(f"state{i}")
    state.mul_(0.9).add_(0.1 * values[-1].detach().mean((0, 1)))
    return values[-1] + state


STEPS: tuple[Step, ...] = (
    *([_linear] * 4),
    *([_activate] * 2),
    *(_normalise, _attend, _add, _add, _gate, _centre, _sum, _in_place, _assign, _view, _join, _mask, _remember),
)


class RandomModule(nn.Module):
    """The module of one seed: 4 to 10 steps, each from the newest value and one shortly before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        count = Random(seed).randint(4, 10)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.norms = nn.ModuleList(Random(seed + i).choice((nn.LayerNorm, nn.RMSNorm))(WIDTH) for i in range(count))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(count))
        for i in range(count):
            self.register_buffer(f"state{i}", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        random = Random(self.seed)
        values = [x]
        for i in range(random.randint(4, 10)):
            values.append(random.choice(STEPS)(self, i, values, random))
        return values[-1], values[len(values) // 2].mean(-1)


def fault(seed: int, dtype: torch.dtype, fold: str, weights: str) -> str:
    """What is wrong with the conversion of the module of ``seed``; empty where nothing is.

    Outputs, buffers and each gradient may be as far from float32 as the longest chain of 16-bit values rounds, or twice
    as far as torch.autocast is.
    """
    model = RandomModule(seed).train(weights != "low")
    x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(seed))
    eager, cast = copy.deepcopy(model), copy.deepcopy(model)
    amp = autocastfx.convert(copy.deepcopy(model), (x,), dtype=dtype, fold=fold, weights=weights)
    expected = _run(eager, x, weights)
    found = _run(amp, x, weights)
    with torch.autocast("cpu", dtype):
        theirs = _run(cast, x, weights)
    bound = 2 * max(2, roundings(amp.graph, dtype)) * torch.finfo(dtype).eps
    largest = max((float(t.norm()) for name, t in expected.items() if name.startswith("gradient")), default=0.0)
    for name, exact in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name].dtype != exact.dtype:
            return f"{name} is {found[name].dtype}"
        floor = 1e-2 * largest / max(float(exact.norm()), 1e-30) if name.startswith("gradient") else 0.0
        allowed = max(bound * max(1.0, floor), 2 * distance(theirs[name].to(exact.dtype), exact))
        error = distance(found[name], exact)
        if not error <= allowed:
            return f"{name} is off by {error:.2g}, allowed {allowed:.2g}"
    return ""


def _run(module: nn.Module, x: Tensor, weights: str) -> dict[str, Tensor]:
    """Outputs, buffers and, where weights can be trained, gradients, by name."""
    trains = weights != "low"
    with torch.set_grad_enabled(trains):
        outputs = module(x.clone())
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    if trains:
        weights_of = torch.Generator().manual_seed(0)
        total = sum((out.float() * torch.randn(out.shape, generator=weights_of)).sum() for out in outputs)
        if isinstance(total, Tensor) and total.requires_grad:  # some have no layer
            total.backward()
        found |= {f"gradient {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each fault; the exit status is 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.invariants.random_modules")
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faults = 0
    combinations = list(itertools.product((torch.float16, torch.bfloat16), FOLDS, WEIGHTS))
    for seed in range(options.count):
        for dtype, fold, weights in combinations:
            try:
                said: Any = fault(seed, dtype, fold, weights)
            except Exception as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if said:
                faults += 1
                print(f"{seed} {dtype} {fold} {weights}: {said}", flush=True)
    print(f"{options.count * len(combinations)} conversions, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
