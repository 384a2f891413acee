"""Search for the plan of fewest bytes within an error, or of the least error within bytes, by measured errors."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from autocastfx.capture.export import Captured
from autocastfx.conversion import convert_captured
from autocastfx.errors import SensitivityError
from autocastfx.numerics.budget import Limit, Point
from autocastfx.numerics.cut_between import cut_between
from autocastfx.numerics.fill_plan import filled
from autocastfx.numerics.sensitivity import captured_of
from autocastfx.numerics.target_error import TargetError
from autocastfx.numerics.tuned_rules import rules_for
from autocastfx.passes.pipeline import Converter
from autocastfx.passes.variant_maker import VariantMaker
from autocastfx.plan.plan import Plan, Prices
from autocastfx.policy.op_list import OpList
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.variant import Variant

__all__ = ["Found", "PlanSearch"]

_MOST_CUTS = 20
_MOST_MEASURED = 5
_DECADES = range(-3, 4)  # of the price of an error, around the one at which it costs what all bytes do
_LAST_DECADE = 9
_SLACK = 1.25  # an error predicted to be larger by this factor may yet be smaller
_CLOSE = 1.05  # prices that are not told apart
_MOST_FILLED = 4  # plans


@dataclass(frozen=True)
class Found:
    """A plan, without its casts: as it was cut, without rules yet; or as it follows from rules."""

    point: Point
    plan: Plan
    rules: OpList | None = None


@dataclass
class PlanSearch:
    """One search.

    Attributes:
        base: converted by the list to start from.
        variant: of it, the one that was measured.
        prices: what was measured, and the time of products.
        low: the 16-bit dtype.
        start: the plan of the list to start from, with its predicted errors.
        plans: by the price of an error.
    """

    base: AmpModule
    variant: Variant
    prices: Prices
    low: torch.dtype
    start: Plan = field(init=False)
    plans: dict[float, Plan] = field(default_factory=dict[float, Plan])

    def __post_init__(self) -> None:
        self.start = self._plan_of(self.converter)

    @property
    def converter(self) -> Converter:
        """The converter of the list to start from, which predicts errors."""
        return replace(cast("VariantMaker", self.base._maker).converter, prices=self.prices)

    def result(self, judge: TargetError, limit: Limit, started: Point) -> tuple[Found, list[Point]]:
        """Sweep the price of an error, measure plans near the limit, and choose.

        Returns:
            The best plan within the limit, with its casts, and the points of all that were looked at.

        Raises:
            SensitivityError: no plan keeps the limit.
        """
        self._sweep(limit)
        ratios = [started.error / started.predicted] if started.error and started.predicted else [1.0]
        found = self._near(limit, ratios[0])
        tried: list[Found] = []
        while len(tried) < _MOST_MEASURED and (following := _next(found, limit, ratios, tried)) is not None:
            found.remove(following)
            said = following if following.rules is not None else self._said(following.plan)
            is_over = limit.bytes is not None and not limit.keeps(said.point)  # rules may move more than their plan
            if is_over or any(_key(one.plan) == _key(said.plan) for one in tried):
                continue
            point = replace(said.point, measured=self._measured(said, judge))
            tried.append(replace(said, point=point))
            if point.predicted and math.isfinite(point.error):
                ratios.append(point.error / point.predicted)
        tried.append(Found(started, self.start, OpList(name="tuned")))
        front = dict.fromkeys(_point("cut", plan) for plan in self.plans.values())
        kept = [one for one in tried if limit.keeps(one.point)]
        if not kept:
            measured = [one.point for one in tried]
            nearest = min(measured, key=lambda p: p.error) if limit.bytes is None else min(front, key=lambda p: p.bytes)
            raise SensitivityError(f"no plan keeps the budget ({limit}): the nearest has {nearest}.")
        best = min(kept, key=lambda one: limit.rank(one.point))
        complete = self._with(best.rules or OpList())(*self._converts).plan
        return replace(best, plan=complete), [*front, *(one.point for one in tried)]

    def _measured(self, said: Found, judge: TargetError) -> float:
        again = convert_captured(self.base, self._with(said.rules or OpList()))
        return judge(cast("AmpModule", again), self.low)

    def _with(self, rules: OpList) -> Converter:
        return replace(self.converter, op_list=self.converter.op_list.merged(rules))

    @property
    def _converts(self) -> tuple[Captured, Mapping[str, torch.Tensor], torch.device]:
        """The arguments of a converter."""
        captured = captured_of(self.variant)
        return captured, self.base._held(), cast("VariantMaker", self.base._maker).device or captured.device

    def _plan_of(self, converter: Converter) -> Plan:
        return converter.decide(*self._converts)

    def _at(self, price: float) -> None:
        """Find the plan of fewest bytes, at a price of an error."""
        if price not in self.plans:
            self.plans[price] = self._cut(OpList(), price)

    def _cut(self, rules: OpList, price: float) -> Plan:
        return self._plan_of(replace(self._with(rules), prices=replace(self.prices, per_error=price)))

    def _sweep(self, limit: Limit) -> None:
        unit = self.start.traffic.moved / max(self.start.error or 0.0, 1e-12) ** 2
        if limit.bytes is not None:
            self._at(0.0)  # the fewest bytes of all
        for decade in _DECADES:
            self._at(unit * 10.0**decade)
        self._reach(unit, limit)
        self._refine(limit)

    def _reach(self, unit: float, limit: Limit) -> None:
        """Raise the price until the limit is passed: if the start's error is large, it says little of other plans'."""
        for decade in range(_DECADES.stop, _LAST_DECADE):
            dearest = self.plans[max(self.plans)]
            if not dearest.error or limit.keeps(_point("", dearest)) == (limit.error is not None):
                return
            self._at(unit * 10.0**decade)

    def _refine(self, limit: Limit) -> None:
        """Cut more finely: first where the predictions pass the limit, then in the widest gap of the front."""
        while len(self.plans) < _MOST_CUTS:
            pairs = [(a, b) for a, b in itertools.pairwise(sorted(self.plans)) if b > _CLOSE * a > 0]
            gaps = {pair: self._gap(*pair) for pair in pairs}
            crossing = [p for p in pairs if self._crosses(limit, *p)]
            first, last = max(crossing or gaps, key=gaps.__getitem__, default=(1.0, 1.0))
            if not gaps.get((first, last)):
                return
            self._at(math.sqrt(first * last))

    def _crosses(self, limit: Limit, price: float, other: float) -> bool:
        first, second = (limit.keeps(_point("", self.plans[one])) for one in (price, other))
        return first != second

    def _gap(self, price: float, other: float) -> float:
        """The area of the front between two plans; 0 if they are equal."""
        a, b = self.plans[price], self.plans[other]
        return abs(a.traffic.moved - b.traffic.moved) * abs((a.error or 0.0) - (b.error or 0.0))

    def _near(self, limit: Limit, ratio: float) -> list[Found]:
        """The distinct plans of the sweep, and plans between them that are cut anew or filled up to the limit."""
        distinct = {_key(plan): plan for _, plan in sorted(self.plans.items())}
        plans = sorted(distinct.values(), key=lambda plan: plan.traffic.moved)
        between = list(self._between(limit))
        found = [Found(_expected(plan, ratio), plan) for plan in between]
        return [*_around(plans, limit, ratio), *found, *self._filled([*plans, *between[-1:]], limit, ratio)]

    def _between(self, limit: Limit) -> Iterator[Plan]:
        """For a limit of bytes, cut plans anew, from the dearest cut within it."""
        within = [price for price, plan in self.plans.items() if price and limit.keeps(_point("", plan))]
        if limit.bytes is not None and within:
            yield from cut_between(self.plans[max(within)], max(within), limit.bytes, self._cut)

    def _filled(self, plans: Sequence[Plan], limit: Limit, ratio: float) -> Iterator[Found]:
        """Fill the dearest plans within a limit of bytes; for a limit of errors, the dearest plans beyond it."""
        within = [plan for plan in plans if limit.keeps(_expected(plan, ratio))]
        if limit.bytes is not None:
            starts, most = within, limit.bytes
        else:
            starts = [plan for plan in plans if plan not in within]
            most = min((plan.traffic.moved for plan in within), default=math.inf) - 1
        for start in starts[-_MOST_FILLED:]:
            said = self._said(start)
            rules = said.rules or OpList()
            for plan in filled(rules, said.plan, most, lambda rules: self._plan_of(self._with(rules))):
                yield Found(_point("tuned", plan), plan)
                if limit.error is not None and limit.keeps(_expected(plan, ratio)):
                    break

    def _said(self, plan: Plan) -> Found:
        rules, found = rules_for(plan, self.start, lambda r: self._plan_of(self._with(r)), self.prices.sensitivity)
        return Found(_point("tuned", found), found, rules)


def _next(found: Sequence[Found], limit: Limit, ratios: Sequence[float], tried: Sequence[Found]) -> Found | None:
    """Return the plan to measure next: the best that should keep the limit, by the errors so far; None if none is left.

    Beyond a limit of errors, a plan would be kept by the chance of the few batches that are held out. Within a limit of
    bytes, one that is predicted to be a little worse may be better.
    """
    best = min((limit.rank(one.point) for one in tried if limit.keeps(one.point)), default=None)
    ratio = statistics.median(ratios)
    for slack in (1.0,) if limit.bytes is None else (1.0, _SLACK):
        expected = [_expected(one.plan, ratio / slack) for one in found]
        fits = [(limit.rank(point), i) for i, point in enumerate(expected) if limit.keeps(point)]
        fits = [pair for pair in fits if best is None or pair[0] < best]
        if fits:
            return found[min(fits)[1]]
    return None


def _key(plan: Plan) -> tuple[int, float | None]:
    """The bytes and the predicted error of a plan: two plans that agree in both are taken for one."""
    return plan.traffic.moved, plan.error


def _point(name: str, plan: Plan) -> Point:
    return Point(name, plan.traffic.moved, plan.error or 0.0)


def _expected(plan: Plan, ratio: float) -> Point:
    found = _point("", plan)
    return replace(found, measured=found.predicted * ratio)


def _around(plans: Sequence[Plan], limit: Limit, ratio: float) -> list[Found]:
    """The plans within the limit that are best, and the nearest beyond it."""
    order = sorted(plans, key=lambda plan: limit.rank(_expected(plan, ratio)))
    kept = [plan for plan in order if limit.keeps(_expected(plan, ratio))]
    beyond = [plan for plan in reversed(order) if plan not in kept]
    return [Found(_expected(plan, ratio), plan) for plan in (*kept[:_MOST_MEASURED], *beyond[:1])]
