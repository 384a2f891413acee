"""The result of ``time``: the times of a model's sides in turns, as text and as the data of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from autocastfx.graph.cell import aligned

FLOAT32, AUTOCAST, DEFAULT, CACHED = "float32", "torch.autocast", "converted", "cached and kernel"
COMPILED_AUTOCAST, COMPILED = "torch.autocast, compiled", "converted, compiled"
_WORDS = {DEFAULT: "the default", CACHED: 'weights="cached", fold="kernel"', COMPILED: "torch.compile(amp_model)"}
_LARGEST = 3  # ops of a side that are named
_MOST_ON_A_PAGE = 20  # ops
_MATTERS = 0.05  # the share of a side's time from which an op is worth a sentence
_SLEEPS = 0.7  # the kernels' share of the time below which a GPU waits for the host


@dataclass(frozen=True)
class TimedSide:
    """One way to run the model.

    Attributes:
        name: what it is.
        milliseconds: of each round, by the clock; a GPU is waited for.
        ratios: quartiles of these to torch.autocast's of the same round.
        ops: milliseconds of each op by itself in one call, as torch's profiler counts them, the largest first: of
            kernels on a GPU.
    """

    name: str
    milliseconds: tuple[float, ...]
    ratios: tuple[float, float, float]
    ops: Mapping[str, float] = field(repr=False)


@dataclass(frozen=True)
class Timing:
    """The result of :func:`time`. It prints a table, with the largest ops of each side, and says what to change.

    Attributes:
        what: of which model, in which dtype, where, and whether a call is a forward or a training step without
            optimizer.
        device: the type of the device.
        sides: in the order of the table.
    """

    what: str
    device: str
    sides: tuple[TimedSide, ...]

    def side(self, name: str) -> TimedSide:
        """Return the side of this name.

        Raises:
            KeyError: there is none.
        """
        return {one.name: one for one in self.sides}[name]

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences: which way is the fastest, and what makes the others slow."""
        ours = [one for one in self.sides if one.name in _WORDS]
        best, default = min(ours, key=lambda one: one.ratios[1]), self.side(DEFAULT)
        low, middle, high = best.ratios
        if high < 1:
            said = [f"the fastest is {_WORDS[best.name]}: {middle:.2f} of torch.autocast's time."]
        else:
            said = [f"nothing is faster than torch.autocast for certain: {best.name} takes {low:.2f} to {high:.2f}."]
        if default.ratios[0] > 1:
            theirs = self.side(AUTOCAST).ops
            more = {op: spent - theirs.get(op, 0.0) for op, spent in default.ops.items()}
            worst = max(more, key=lambda op: more[op], default="")
            if worst and more[worst] > _MATTERS * median(default.milliseconds):
                said.append(f"the default takes {more[worst]:.3g} ms more in {worst}: explain shows why it runs so.")
        computed = sum(default.ops.values())
        if self.device == "cuda" and computed < _SLEEPS * median(default.milliseconds):
            said.append(
                f"the GPU waits for the host: kernels take {computed:.3g} of {median(default.milliseconds):.3g} ms. A "
                "larger batch, a CUDA graph or torch.compile gives it more to do at once."
            )
        if median(self.side(FLOAT32).milliseconds) < min(median(one.milliseconds) for one in ours):
            said.append("float32 is the fastest: this device computes in 16 bits no faster, or the model is small.")
        return tuple(said)

    def page_data(self) -> dict[str, Any]:
        """Return what a page shows: the sides as the table has them, and of the largest ops the time in each side."""
        ops = {op: max(side.ops.get(op, 0.0) for side in self.sides) for side in self.sides for op in side.ops}
        largest = sorted(ops, key=lambda op: -ops[op])[:_MOST_ON_A_PAGE]
        return {
            "what": self.what,
            "sides": [[one.name, f"{median(one.milliseconds):.3g}", _quartiles(one.ratios)] for one in self.sides],
            "ops": [[op, *(f"{one.ops[op]:.3g}" if op in one.ops else "" for one in self.sides)] for op in largest],
            "advice": self.advice,
        }

    def __str__(self) -> str:
        rows = [("", "ms", "of torch.autocast's", "largest ops, ms")]
        for one in self.sides:
            ops = ", ".join(f"{op} {spent:.3g}" for op, spent in list(one.ops.items())[:_LARGEST])
            rows.append((one.name, f"{median(one.milliseconds):.3g}", _quartiles(one.ratios), ops))
        return "\n".join([self.what, *aligned(rows), *self.advice])


def _quartiles(ratios: tuple[float, float, float]) -> str:
    low, middle, high = ratios
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
