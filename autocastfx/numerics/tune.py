"""``tune``: choose the precision of each op by measured errors and bytes, within a budget."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.given_inputs import arguments_of, batches_of
from autocastfx.capture.progress import Progress, counted, stage
from autocastfx.conversion import convert, convert_captured
from autocastfx.dtypes import low_dtype
from autocastfx.errors import SensitivityError
from autocastfx.numerics.sensitivity import Inputs, LossFunction, Measuring, check_fits
from autocastfx.numerics.target_error import TargetError
from autocastfx.numerics.tuned import Budget, Point, Tuned
from autocastfx.numerics.tuned_rules import mixed, rules_for
from autocastfx.passes.pipeline import Converter
from autocastfx.passes.variant_maker import VariantMaker
from autocastfx.plan.plan import Plan
from autocastfx.plan.prices import Prices
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.policy.op_list import OpList, OpListLike, load_op_list
from autocastfx.report.lint.gpu import Gpu, find_gpu
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["tune"]

_MOST_CUTS = 20
_MOST_MEASURED = 5
_DECADES = range(-3, 4)  # of the price of an error, around the one at which it costs what all bytes do
_SLACK = 1.25  # a predicted error above the budget by this factor may yet be measured below it
_CLOSE = 1.05  # prices that are not told apart


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    budget: str | Budget = "default",
    of: str = "gradient",
    probes: int = 8,
    held_out: int = 1,
    sensitivity: Sensitivity | None = None,
    dtype: torch.dtype | str | None = None,
    op_list: OpListLike = "default",
    fold: str = "exact",
    inputs: Inputs | None = None,
    gpu: Gpu | str = "A100",
    progress: Progress = None,
) -> Tuned:
    """Find the op list that moves the fewest bytes within an error budget, for this model and these batches.

    Errors are measured as by :func:`sensitivity`. Their squares, at a price, are terms of the same minimum cut that
    counts bytes; raising the price traces the front of bytes against error. Up to five plans near the budget are then
    measured on batches that were held out, and the cheapest that keeps the budget is returned as rules of a list.

    What no measurement may change stays as the list has it: forced rules, ``keep``, ``ban`` and ``promote`` ops, shared
    storage, ops that were not measured, and rules of your own.

    Args:
        model: a float32 model.
        batches: as for :func:`sensitivity`; at least ``held_out`` + 1.
        loss_fn: as for :func:`sensitivity`.
        budget: ``"default"``: no more error than ``op_list`` has; the name of another list: than that list has; or a
            :class:`Budget`.
        of: ``"gradient"`` for training, ``"output"`` for inference.
        probes: as for :func:`sensitivity`.
        held_out: the number of batches, the last ones, that are not measured on but judged on.
        sensitivity: one measured before, instead of measuring it on the other batches.
        dtype: as for :func:`convert`.
        op_list: the list to start from.
        fold: as for :func:`convert`.
        inputs: as for :func:`sensitivity`.
        gpu: whose rates say what a float32 product costs beside bytes.
        progress: as for :func:`calibrate`.

    Raises:
        SensitivityError: as for :func:`sensitivity`; there are too few batches; or no plan keeps the budget.
        OpListError, CaptureError: as for :func:`convert`.
    """
    given = list(batches_of(batches))
    if held_out < 1 or len(given) < held_out + (sensitivity is None):
        raise SensitivityError(
            f"there are {len(given)} batches, of which {held_out} are held out to judge on: give at least one of each."
        )
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    args, kwargs = arguments_of(given[0] if inputs is None else inputs(given[0]))
    check_fits(model, args, kwargs)
    base = convert(model, args, kwargs or None, dtype=dtype, op_list=op_list, fold=fold)
    low = low_dtype(base.plan.low)
    if sensitivity is None:
        measuring = Measuring(base, loss_fn, of, probes, inputs)
        with counted(progress, "measuring sensitivity") as show:
            for done, batch in enumerate(given[:-held_out], 1):
                measuring.add(batch)
                show(done)
        sensitivity = cast("Sensitivity", measuring.found)
    elif (sensitivity.of, sensitivity.dtype) != (of, base.plan.low):
        raise SensitivityError(
            f"the sensitivity is of the {sensitivity.of} to {sensitivity.dtype}, and this tunes the {of} in "
            f"{base.plan.low}: measure it alike."
        )
    per_flop = chosen.bandwidth / chosen.peak(tensor_cores=False) - chosen.bandwidth / chosen.peak(tensor_cores=True)
    call = base._variant_for(args, kwargs)
    search = _Search(base, call.modes, sensitivity, per_flop, low)
    judge = TargetError(model, given[-held_out:], loss_fn, of, inputs)
    with stage("choosing plans"):
        return search.result(judge, budget, op_list, fold)


@dataclass
class _Search:
    """The search for a plan.

    Attributes:
        base: converted by the list to start from.
        modes: of the variant that was measured.
        sensitivity: what was measured.
        per_flop: see ``Prices``.
        low: the 16-bit dtype.
        plans: by the price of an error.
    """

    base: AmpModule
    modes: tuple[bool, ...]
    sensitivity: Sensitivity
    per_flop: float
    low: torch.dtype
    plans: dict[float, Plan] = field(default_factory=dict[float, Plan])

    @property
    def converter(self) -> Converter:
        return replace(
            cast("VariantMaker", self.base._maker).converter, prices=Prices(self.sensitivity, None, self.per_flop)
        )

    def plan_of(self, converter: Converter) -> Plan:
        """The plan of the measured variant by another converter."""
        variant = next(v for v in self.base.variants if v.modes == self.modes)
        if variant.captured is None:
            raise SensitivityError("the captured graph is not at hand: convert the model again.")
        device = cast("VariantMaker", self.base._maker).device or variant.captured.device
        return converter(variant.captured, self.base._held(), device).plan

    def with_rules(self, rules: OpList) -> Plan:
        """The plan by rules laid over the list to start from."""
        return self.plan_of(replace(self.converter, op_list=self.converter.op_list.merged(rules)))

    def at(self, price: float) -> Plan:
        """The plan of fewest bytes, at a price of an error."""
        if price not in self.plans:
            self.plans[price] = self.plan_of(
                replace(self.converter, prices=Prices(self.sensitivity, price, self.per_flop))
            )
        return self.plans[price]

    def result(self, judge: TargetError, budget: str | Budget, op_list: OpListLike, fold: str) -> Tuned:
        """Sweep, measure, and choose.

        Raises:
            SensitivityError: no plan keeps the budget.
        """
        start = self.with_rules(OpList())
        started = Point("start", start.traffic.moved, start.error or 0.0, judge(self.base, self.low))
        limit = self._limit(budget, start, started, judge)
        unit = start.traffic.moved / max(started.predicted, 1e-12) ** 2
        for decade in _DECADES:
            self.at(unit * 10.0**decade)
        self._refine(limit)
        ratios = [started.measured / started.predicted] if started.measured and started.predicted else [1.0]
        found = self._near(limit, ratios[0])
        tried: list[_Found] = []
        while len(tried) < _MOST_MEASURED and (following := self._next(found, limit, ratios, tried)) is not None:
            found.remove(following)
            said = following if following.is_said else self._said(following.plan)
            if any(one.rules == said.rules for one in tried):
                continue
            listed = replace(self.converter, op_list=self.converter.op_list.merged(said.rules))
            measured = judge(cast("AmpModule", convert_captured(self.base, listed)), self.low)
            tried.append(replace(said, point=replace(said.point, measured=measured)))
            if said.point.predicted and math.isfinite(measured):
                ratios.append(measured / said.point.predicted)
        tried.append(_Found(started, OpList(name="tuned"), start))
        kept = [one for one in tried if limit.keeps(one.point)]
        if not kept:
            least = min((one.point for one in tried), key=lambda point: point.measured or 0.0)
            raise SensitivityError(f"no plan keeps the budget ({limit}): the nearest has {least}.")
        best = min(kept, key=lambda one: limit.rank(one.point))
        front = list(dict.fromkeys(Point("cut", p.traffic.moved, p.error or 0.0) for p in self.plans.values()))
        points = [*front, *(one.point for one in tried)]
        return Tuned(
            rules=best.rules,
            op_list=replace(self.base_list.merged(best.rules), name="tuned"),
            base=op_list,
            plan=best.plan,
            point=best.point,
            start=started,
            front=tuple(sorted(points, key=lambda p: (p.bytes, p.predicted))),
            sensitivity=self.sensitivity,
            budget=limit,
            options={"dtype": self.low, "fold": fold},
        )

    @property
    def base_list(self) -> OpList:
        return self.converter.op_list

    def _limit(self, budget: str | Budget, start: Plan, started: Point, judge: TargetError) -> Budget:
        if isinstance(budget, Budget):
            return budget if budget.bytes is None else Budget(bytes=budget.bytes * start.traffic.moved)
        if budget == "default":
            return Budget(error=started.measured)
        listed = replace(self.converter, op_list=load_op_list(budget, default=self.base.plan.low))
        other = convert_captured(self.base, listed)
        return Budget(error=judge(cast("AmpModule", other), self.low))

    def _refine(self, limit: Budget) -> None:
        """Cut more finely: first where the predictions pass the limit, then in the widest gap of the front."""
        while len(self.plans) < _MOST_CUTS:
            pairs = [(a, b) for a, b in itertools.pairwise(sorted(self.plans)) if b / a > _CLOSE]
            gaps = {pair: self._gap(*pair) for pair in pairs}
            crossing = [p for p in pairs if limit.lies_between(self.plans[p[0]], self.plans[p[1]])]
            first, last = max(crossing or gaps, key=gaps.__getitem__, default=(1.0, 1.0))
            if not gaps.get((first, last)):
                return
            self.at(math.sqrt(first * last))

    def _gap(self, price: float, other: float) -> float:
        """The area of the front between two plans; 0 if they are equal."""
        a, b = self.plans[price], self.plans[other]
        return abs(a.traffic.moved - b.traffic.moved) * abs((a.error or 0.0) - (b.error or 0.0))

    def _near(self, limit: Budget, ratio: float) -> list[_Found]:
        """The distinct plans of the sweep, and three between those on either side of the limit."""
        distinct = {(plan.traffic.moved, plan.error): plan for _, plan in sorted(self.plans.items())}
        plans = sorted(distinct.values(), key=lambda plan: plan.traffic.moved)
        within = [limit.keeps(_expected(plan, ratio)) for plan in plans]
        for (cheap, dear), (first, second) in zip(itertools.pairwise(plans), itertools.pairwise(within), strict=True):
            if first != second:
                between = [self._said(mixed(dear, cheap, share)) for share in (0.25, 0.5, 0.75)]
                return [*_around(plans, limit, ratio), *between]
        return _around(plans, limit, ratio)

    def _said(self, plan: Plan) -> _Found:
        rules, found = rules_for(plan, self.with_rules, self.sensitivity)
        return _Found(Point("tuned", found.traffic.moved, found.error or 0.0), rules, found)

    def _next(
        self, found: Sequence[_Found], limit: Budget, ratios: Sequence[float], tried: Sequence[_Found]
    ) -> _Found | None:
        """What to measure next: the cheapest that should keep the limit, by errors measured so far; or nearly so."""
        best = min((limit.rank(one.point) for one in tried if limit.keeps(one.point)), default=None)
        ratio = statistics.median(ratios)
        for slack in (1.0, _SLACK):
            expected = [_expected(one.plan, ratio / slack) for one in found]
            fits = [(limit.rank(point), i) for i, point in enumerate(expected) if limit.keeps(point)]
            fits = [pair for pair in fits if best is None or pair[0] < best]
            if fits:
                return found[min(fits)[1]]
        return None


@dataclass(frozen=True)
class _Found:
    """A plan, as it was cut, or as it follows from rules."""

    point: Point
    rules: OpList
    plan: Plan
    is_said: bool = True


def _expected(plan: Plan, ratio: float) -> Point:
    error = plan.error or 0.0
    return Point("", plan.traffic.moved, error, error * ratio)


def _around(plans: Sequence[Plan], limit: Budget, ratio: float) -> list[_Found]:
    """The plans within the limit that are best, and the nearest beyond it."""
    order = sorted(plans, key=lambda plan: limit.rank(_expected(plan, ratio)))
    kept = [plan for plan in order if limit.keeps(_expected(plan, ratio))]
    beyond = [plan for plan in reversed(order) if plan not in kept]
    chosen = [*kept[:_MOST_MEASURED], *beyond[:1]]
    return [_Found(_expected(plan, ratio), OpList(), plan, is_said=False) for plan in chosen]
