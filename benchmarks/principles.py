"""Measure the benefit of each of the three principles of precision: errors in bfloat16 on a CPU.

    python -m benchmarks.principles [--json PATH]

Provenance: 96 Euler steps ``y = y + 1e-3 * f(y)``. Shape: rotary angles, a product of positions and frequencies that
adds up one element. Demand: ``-log(1 - p)`` of a sigmoid. Errors are relative to the float64 result, for the Euler
steps relative to the distance that y has moved.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import autocastfx
from benchmarks.command import Command
from benchmarks.store import Store

OURS, AUTOCAST, HALF = "autocastfx", "torch.autocast", "pure bfloat16"
LOW = torch.bfloat16
WIDTH = 32


@dataclass(frozen=True)
class Row:
    """The error of a side: after a number of steps, at a position, or around a logit."""

    principle: str
    x: int
    side: str
    error: float


class Euler(nn.Module):
    """Return the state after each of a number of small steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.into, self.out = steps, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor) -> Tensor:
        start = y
        for _ in range(self.steps):
            y = y + 1e-3 * self.out(torch.tanh(self.into(y)))
        return y - start


class Rotary(nn.Module):
    """Compute the rotation at the 64 positions up to a given one, as decoders do."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.register_buffer("position", torch.arange(position - 64, position).float())
        self.register_buffer("frequency", 10_000 ** -torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency[:, None] @ self.position[None, :]) * x.mean().sign().abs()


class Surprise(nn.Module):
    """Compute the surprise that a likely event does not happen, ``-log(1 - p)``, for logits around a number."""

    def __init__(self, logit: int) -> None:
        super().__init__()
        self.logit, self.into = float(logit), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return -torch.log(1 - torch.sigmoid(self.into(x) + self.logit))


PRINCIPLES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "provenance": (Euler, (6, 12, 24, 48, 96)),
    "shape": (Rotary, (64, 256, 1024, 4096)),
    "demand": (Surprise, (0, 1, 2, 3, 4)),
}


def measure(principle: str, x: int) -> list[Row]:
    """Return a row for each side."""
    torch.manual_seed(0)
    build, _ = PRINCIPLES[principle]
    model, inputs = build(x), torch.randn(64, WIDTH)
    exact = copy.deepcopy(model).double()(inputs.double()).detach()
    ours = autocastfx.convert(model, (inputs,), dtype=LOW)(inputs)
    with torch.autocast("cpu", LOW):
        autocast = model(inputs)
    half = copy.deepcopy(model).to(LOW)(inputs.to(LOW))
    sides = {OURS: ours, AUTOCAST: autocast, HALF: half}
    errors = {side: float((found.detach().double() - exact).norm() / exact.norm()) for side, found in sides.items()}
    return [Row(principle, x, side, float(f"{error:.3g}")) for side, error in errors.items()]


def table(rows: Sequence[Row]) -> str:
    """Write a line for each place, with the error of each side."""
    lines = [f"{'principle':<11} {'at':>5} " + " ".join(f"{side:>14}" for side in (OURS, AUTOCAST, HALF))]
    for principle, x in dict.fromkeys((row.principle, row.x) for row in rows):
        errors = {row.side: row.error for row in rows if (row.principle, row.x) == (principle, x)}
        lines.append(f"{principle:<11} {x:>5} " + " ".join(f"{errors[s]:>14.1e}" for s in (OURS, AUTOCAST, HALF)))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all; the exit status is 1 if torch.autocast is more exact somewhere."""
    store = Store(Command("principles", __doc__).begin(arguments).json, Row, {})
    asked = ((principle, x) for principle, (_, places) in PRINCIPLES.items() for x in places)
    store.fill(asked, "principle x", lambda place: measure(*place))
    print(table(store.rows))
    found = {(row.principle, row.x, row.side): row.error for row in store.rows}
    return int(
        any(e > 1.2 * found[p, x, AUTOCAST] + torch.finfo(LOW).eps for (p, x, s), e in found.items() if s == OURS)
    )


if __name__ == "__main__":
    sys.exit(main())
