"""Say in one glance how much of a graph runs in 16 bits, and why the rest does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autocastfx.files import plain_data
from autocastfx.plan.plan import Cause, Forced, PlannedNode, Precision, Why
from autocastfx.report.view import Row, View

_MOST = 5  # reasons
_MOST_OPS = 3  # that a reason names
_BY_CATEGORY = (Why.ALLOW, Why.DENY, Why.KEEP, Why.PROMOTE)


@dataclass(frozen=True)
class Headline:
    """How much of a graph runs in 16 bits.

    An op computes if it reads and writes floating-point elements: views, sizes, labels and casts are left out.

    Attributes:
        dtype: the 16-bit dtype.
        low, float32: how many computing ops run in either.
        float8: how many of ``low`` have products in float8.
        flops, flops_low: operations of the matrix products and convolutions in forward for the example inputs, of all
            and of those in 16 bits or less; 0 where they are not known.
        reasons: why ops are float32, the most frequent first.
    """

    dtype: str
    low: int
    float32: int
    float8: int
    flops: int
    flops_low: int
    reasons: tuple[Float32Reason, ...]

    @property
    def says(self) -> str:
        """The share of the computing ops: ``77 % of ops in bfloat16``."""
        count = self.low + self.float32
        return f"{percent(self.low, count)} of ops in {self.dtype}" if count else "No op computes floating-point values"

    @property
    def details(self) -> str:
        """Counts, and the shares of float8 and of the work of matrix products."""
        count = self.low + self.float32
        clauses = [f"{self.low:,} of {count:,} computing ops"] if count else []
        clauses += [f"{self.float8:,} of them partly in float8"] if self.float8 else []
        clauses += [f"{percent(self.flops_low, self.flops)} of matrix FLOPs"] if self.flops else []
        return ", ".join(clauses)


@dataclass(frozen=True)
class Float32Reason:
    """A reason that keeps ops in float32.

    Attributes:
        says: the reason in words.
        count: how many computing ops it keeps there.
        ops: their names, the most frequent first.
    """

    says: str
    count: int
    ops: tuple[str, ...]


def percent(part: int, of: int) -> str:
    """Return a share in whole percent; 0 and 100 only where nothing and where all of it is meant. All is above 0."""
    rounded = round(100 * part / of)
    return f"{min(max(rounded, 1), 99) if 0 < part < of else rounded} %"


def computing(rows: Sequence[Row]) -> list[Row]:
    """Return the ops that compute floating-point values."""
    return [row for row in rows if row.computes and row.precision is not Precision.CAPTURED]


def runs_low(row: Row, low: str) -> bool:
    """True for an op that runs in 16 bits, also where these come with its inputs."""
    if row.precision is Precision.GIVEN:
        return row.dtype.rpartition(" → ")[2] == low
    return row.precision is Precision.LOW


def headline(view: View) -> Headline:
    """Sum up a graph."""
    low, known = view.plan.low, {row.name: row.planned for row in view.rows if row.planned is not None}
    ops = computing(view.rows)
    wide = [row for row in ops if not runs_low(row, low)]
    by_reason: dict[str, Counter[str]] = {}
    for row in wide:
        if row.planned is not None:
            by_reason.setdefault(brief_reason(row.planned, known), Counter()).update((row.op,))
    reasons = sorted(by_reason.items(), key=lambda pair: -pair[1].total())[:_MOST]
    return Headline(
        dtype=low,
        low=len(ops) - len(wide),
        float32=len(wide),
        float8=sum(row.precisions.endswith("float8") for row in ops),
        flops=sum(row.flops for row in ops),
        flops_low=sum(row.flops for row in ops if runs_low(row, low)),
        reasons=tuple(Float32Reason(says, ops.total(), _named(ops)) for says, ops in reasons),
    )


def _named(ops: Counter[str]) -> tuple[str, ...]:
    return tuple(op for op, _ in ops.most_common(_MOST_OPS)) + (("…",) if len(ops) > _MOST_OPS else ())


def brief_reason(node: PlannedNode, known: Mapping[str, PlannedNode]) -> str:
    """Return why a node runs in its precision, in words that equal nodes share: other nodes are told by their ops.

    ``known`` has all nodes of the plan, by name.
    """
    because = node.placement.because
    if because.why in _BY_CATEGORY or isinstance(node.decision.source, Forced):
        return node.decision.reason or f"{node.decision.category}, no reason given"
    ops = [known[name].op if name in known else name for name in because.nodes]
    if because.why is Why.AFTER:
        return f"comes after {ops[0]}, which is float32"
    if because.why is Why.NO_ALLOW_BEFORE:
        return "no op that gains by 16 bits comes before it"
    return Cause(because.why, tuple(ops)).clause


def headline_data(found: Headline) -> dict[str, Any]:
    """Return what the page shows of a headline."""
    shown = {"says": found.says, "details": found.details, "low": found.low, "float32": found.float32}
    return {**shown, **({"reasons": plain_data(found.reasons)} if found.reasons else {})}
