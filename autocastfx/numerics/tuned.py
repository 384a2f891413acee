"""The result of ``tune``: an op list, the plan that follows from it, and the front it was chosen from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from autocastfx.conversion import convert
from autocastfx.files import write_whole
from autocastfx.plan.plan import Plan
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.policy.op_list import OpList, OpListLike
from autocastfx.report.front_picture import Front, front_picture
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["Budget", "Point", "Tuned"]

_WORTH = 0.01  # a share of bytes, or of error, below which nothing was gained


@dataclass(frozen=True)
class Point:
    """A plan's cost and error.

    Attributes:
        name: where it comes from: ``"start"``, the list to start from; ``"cut"``; or ``"tuned"``, measured as a list.
        bytes: moved by ops and casts in a call.
        predicted: relative error of the target.
        measured: the same, on batches held out; None if it was not measured.
    """

    name: str
    bytes: int
    predicted: float
    measured: float | None = None

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"measured {self.measured:.2e}"
        return f"{self.bytes / 1e6:.2f} MB, predicted error {self.predicted:.2e}, {measured}"


@dataclass(frozen=True)
class Budget:
    """How much a plan may cost; one of the two.

    Attributes:
        error: the largest relative error of the target; of the plans within it, the one of fewest bytes is best.
        bytes: as :func:`tune` takes it, the largest share of the bytes that the list to start from moves; of the plans
            within it, the one of the least error is best.

    Raises:
        ValueError: both are given, or none; or it is not above 0.
    """

    error: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.error, self.bytes) if value is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(f"a budget is an error or a share of bytes, above 0, not {self}")

    def __str__(self) -> str:
        return f"an error of {self.error:.2e}" if self.error is not None else f"{(self.bytes or 0) / 1e6:.2f} MB"

    def keeps(self, point: Point) -> bool:
        """True if a plan is within the budget; by its predicted error if it was not measured."""
        if self.error is not None:
            return (point.predicted if point.measured is None else point.measured) <= self.error
        return point.bytes <= (self.bytes or 0)

    def rank(self, point: Point) -> tuple[float, float]:
        """Return the order among plans within the budget; the least is best."""
        error = point.predicted if point.measured is None else point.measured
        return (point.bytes, error) if self.error is not None else (error, point.bytes)

    def lies_between(self, first: Plan, second: Plan) -> bool:
        """True if one of two plans is within the budget, by its prediction, and the other is not."""
        kept = [self.keeps(Point("", plan.traffic.moved, plan.error or 0.0)) for plan in (first, second)]
        return kept[0] != kept[1]


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` found.

    Attributes:
        rules: by module path and op, each with its reason; to lay over the list that was started from.
        op_list: that list with the rules over it.
        base: the list that was started from, as it was given.
        plan: of the measured mode.
        point: the plan's bytes and errors.
        start: those of the list that was started from.
        front: all plans that were looked at, in the order of their bytes.
        sensitivity: what was measured.
        budget: the budget, as an error or in bytes.
        options: further arguments of the conversion.
    """

    rules: OpList
    op_list: OpList
    base: OpListLike
    plan: Plan
    point: Point
    start: Point
    front: tuple[Point, ...]
    sensitivity: Sensitivity
    budget: Budget
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def gains(self) -> bool:
        """False if the list that was started from is as good: nothing to gain."""
        fewer = self.point.bytes < (1 - _WORTH) * self.start.bytes
        nearer = (self.point.measured or 0.0) < (1 - _WORTH) * (self.start.measured or 0.0)
        return bool(self.rules.modules) and (fewer or nearer)

    def convert(self, model: nn.Module, *inputs: Any, **options: Any) -> AmpModule:
        """Convert ``model`` by the tuned list; arguments as for :func:`autocastfx.convert`."""
        given = {**self.options, "sensitivity": self.sensitivity, **options}
        return convert(model, *inputs, op_list=self.op_list, **given)

    def report(self) -> str:
        """Return the result in words, with the front as a table and the rules."""
        lines = [
            f"budget: {self.budget}",
            f"start:  {self.start}",
            f"tuned:  {self.point}",
        ]
        if not self.gains:
            lines.append("nothing to gain: the list that was started from is as good.")
        lines += ["", f"{'plan':8}{'MB':>10}{'predicted':>12}{'measured':>12}"]
        for p in self.front:
            measured = "" if p.measured is None else f"{p.measured:.2e}"
            lines.append(f"{p.name:8}{p.bytes / 1e6:>10.2f}{p.predicted:>12.2e}{measured:>12}")
        return "\n".join([*lines, "", self.text().rstrip()])

    def plot(self, path: str | Path | None = None) -> str:
        """Draw the front: bytes against error. The axis of errors is of ratios, so a plan without any is left out.

        Args:
            path: also write the picture to this file; an existing file is replaced when it is complete.

        Returns:
            The picture, as SVG.

        Raises:
            OSError: the file cannot be written.
        """
        points = dict.fromkeys(self.front)
        chosen = _place(self.point) if self.gains else None
        cuts = [(float(p.bytes), p.predicted) for p in points if p.name == "cut" and p.predicted > 0]
        measured = [_place(p) for p in points if p.measured is not None and p.name != "start"]
        title = f"{self.plan.low} on {self.plan.device}: error of the {self.sensitivity.of} against bytes"
        shown = [place for place in measured if place is not None and place != chosen]
        front = Front(title, cuts, shown, _place(self.start), chosen, self.budget.error, self.budget.bytes)
        text = front_picture(front)
        if path is not None:
            write_whole(Path(path), text)
        return text

    def text(self) -> str:
        """Return the rules as YAML; they extend the preset that was started from, if it was one."""
        extends = f"extends: {self._preset}\n" if self._preset else ""
        return extends + (self.rules.text() if self.rules.modules else "")

    def save(self, path: str | Path) -> None:
        """Write an op list that :func:`convert` takes: the rules over the list that was started from.

        Raises:
            OSError: the file cannot be written.
        """
        if self._preset and self.rules.modules:
            write_whole(Path(path), self.text())
        else:
            self.op_list.save(path)

    @property
    def _preset(self) -> str:
        if not isinstance(self.base, str) or self.base.endswith((".yaml", ".yml")) or "/" in self.base:
            return ""
        return self.plan.low if self.base == "default" else self.base


def _place(point: Point) -> tuple[float, float] | None:
    """Where a point is drawn: at the error that was measured; None if an axis of ratios does not hold it."""
    error = point.predicted if point.measured is None else point.measured
    return (float(point.bytes), error) if 0 < error < math.inf else None
