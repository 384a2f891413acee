"""Search for the plan of fewest bytes within an error, or of the least error within bytes, by measured errors."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch

from autocastfx.conversion import convert_captured
from autocastfx.errors import ArgumentError, SensitivityError
from autocastfx.graph.names import base_name
from autocastfx.graph.walk import Key, mode_of
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.sensitivity import captured_of
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan, PlannedNode, Precision, Prices
from autocastfx.plan.sensitivity import Effect, Sensitivity, Signature, added
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.variant import Variant


@dataclass(frozen=True)
class Found:
    """A plan, without its casts: as it was cut, without rules yet; or as it follows from rules."""

    point: Point
    plan: Plan
    rules: OpList | None = None

    @classmethod
    def of(cls, name: str, plan: Plan, rules: OpList | None = None) -> Found:
        """Return a plan with the point that it predicts."""
        return cls(Point(name, plan.traffic.moved, plan.error or 0.0), plan, rules)

    @property
    def key(self) -> Point:
        """What was predicted: two plans that agree in all of it are taken for one."""
        return replace(self.point, name="", measured=None)

    def expected(self, ratio: float) -> Point:
        """Return the point with the error that it should have, if measured errors are so many times predicted ones."""
        return replace(self.point, measured=ratio * self.point.predicted)


@dataclass
class PlanSearch:
    """One search for a placement.

    Attributes:
        base: converted by the list to start from.
        variant: of it, the one that was measured.
        prices: what was measured, and the time of products.
        start: the plan of the list to start from, with its predicted errors.
        cuts: by the price of an error, the best plan.
    """

    decades: ClassVar[range] = range(-3, 4)  # of the price of an error, around that at which it costs what all bytes do
    fills: ClassVar[bool] = False  # a candidate, when it is said, up to the error that it may have

    base: AmpModule
    variant: Variant
    prices: Prices
    low: torch.dtype
    start: Plan = field(init=False)
    cuts: dict[float, Found] = field(init=False, default_factory=dict[float, Found])

    def __post_init__(self) -> None:
        self.start = self._plan_of(self.converter)

    @property
    def converter(self) -> Converter:
        """The converter of the list to start from, which predicts errors."""
        return replace(cast("Converter", self.base._original.converter), prices=self.prices)

    @property
    def effects(self) -> Mapping[Key, Effect]:
        """The measured effects of the nodes of the variant."""
        return self.prices.sensitivity.effects_in(mode_of(captured_of(self.variant).training))

    @property
    def unit(self) -> float:
        """The price of a squared error at which that of the start costs what all its bytes do."""
        return self.start.traffic.moved / max(self.start.error or 0.0, 1e-12) ** 2

    def started(self, measured: float) -> Point:
        """Return the point of the list to start from, whose error was measured."""
        return replace(Found.of("start", self.start).point, measured=measured)

    def result(self, judge: TargetDistance, limit: Limit, started: Point) -> tuple[Found, list[Point]]:
        """Find candidates near the limit, measure the most promising of them, and choose.

        Returns:
            The best plan within the limit, with its casts, and the points of all that were looked at.

        Raises:
            SensitivityError: no plan keeps the limit.
        """
        ratios = [started.error / started.predicted] if started.error and started.predicted else [1.0]
        candidates = self._candidates(limit, ratios[0])
        tried: list[Found] = []
        while len(tried) < _MOST_MEASURED and (following := _next(candidates, limit, ratios, tried)) is not None:
            candidates.remove(following)
            said = self._said(following, (limit.error or 0.0) / (ratios[-1] if tried else 1.0))
            is_over = limit.bytes is not None and not limit.keeps(said.point)  # rules may move more than their plan
            if is_over or any(one.key == said.key for one in tried):
                continue
            again = convert_captured(self.base, self._with(said.rules or OpList()))
            point = replace(said.point, measured=judge(cast("AmpModule", again), self.low))
            tried.append(replace(said, point=point))
            if self.fills and not limit.keeps(point):
                candidates.append(following)
            if point.predicted and math.isfinite(point.error):
                ratios.append(point.error / point.predicted)
        tried.append(Found(started, self.start, OpList(name="tuned")))
        front = dict.fromkeys(one.point for one in self.cuts.values())
        kept = [one for one in tried if limit.keeps(one.point)]
        if not kept:
            measured = [one.point for one in tried]
            nearest = min(measured, key=lambda p: p.error) if limit.bytes is None else min(front, key=lambda p: p.bytes)
            raise SensitivityError(f"no plan keeps the budget ({limit}): the nearest has {nearest}.")
        best = min(kept, key=lambda one: limit.rank(one.point))
        complete = self.complete(best.rules or OpList()).plan
        return replace(best, plan=complete), [*front, *(one.point for one in tried)]

    def complete(self, rules: OpList) -> Variant:
        """Convert by rules laid over the list to start from."""
        return self.base._variant_by(self._with(rules), self.variant)

    def _with(self, rules: OpList) -> Converter:
        return replace(self.converter, op_list=self.converter.op_list.merged(rules))

    def _plan_of(self, converter: Converter) -> Plan:
        return self.base._plan_by(converter, self.variant)

    def _at(self, price: float) -> Found:
        """Find the best plan at a price of an error."""
        if price not in self.cuts:
            self.cuts[price] = self._found_at(price)
        return self.cuts[price]

    def _found_at(self, price: float) -> Found:
        return Found.of("cut", self._cut(OpList(), price))

    def _cut(self, rules: OpList, price: float) -> Plan:
        """Find the placement of fewest bytes, by further rules and at a price of an error."""
        return self._plan_of(replace(self._with(rules), prices=replace(self.prices, per_error=price)))

    def _candidates(self, limit: Limit, ratio: float) -> list[Found]:
        """The best cuts within a limit, the nearest beyond it, and plans between cuts that use more of the limit."""
        self._sweep(limit)
        distinct = {one.key: one for _, one in sorted(self.cuts.items())}
        cuts = sorted(distinct.values(), key=lambda one: one.point.bytes)
        between = [Found.of("", plan) for plan in self._between(limit)]
        return [*_around(cuts, limit, ratio), *between, *self._filled([*cuts, *between[-1:]], limit, ratio)]

    def _sweep(self, limit: Limit) -> None:
        if limit.bytes is not None:
            self._at(0.0)  # the fewest bytes of all
        for decade in self.decades:
            self._at(self.unit * 10.0**decade)
        self._reach(limit)
        self._refine(limit)

    def _reach(self, limit: Limit) -> None:
        """Raise the price until the limit is passed: if the start's error is large, it says little of other plans'."""
        for decade in range(self.decades.stop, _LAST_DECADE):
            dearest = self.cuts[max(self.cuts)].point
            if not dearest.error or limit.keeps(dearest) == (limit.error is not None):
                return
            self._at(self.unit * 10.0**decade)

    def _refine(self, limit: Limit) -> None:
        """Cut more finely: first where the predictions pass the limit, then in the widest gap of the front."""
        while len(self.cuts) < _MOST_CUTS:
            points = [(price, one.point) for price, one in sorted(self.cuts.items())]
            gaps = {  # the area of the front between two plans; 0 if they are equal
                (a, b): (
                    limit.keeps(p) != limit.keeps(q),
                    abs(limit.cost(p) - limit.cost(q)) * abs(p.predicted - q.predicted),
                )
                for (a, p), (b, q) in itertools.pairwise(points)
                if b > _CLOSE * a > 0
            }
            first, last = max(gaps, key=gaps.__getitem__, default=(1.0, 1.0))
            if not gaps.get((first, last), (False, 0.0))[1]:
                return
            self._at(math.sqrt(first * last))

    def _between(self, limit: Limit) -> Iterator[Plan]:
        """For a limit of bytes, cut plans anew, from the dearest cut within it."""
        within = [price for price, one in self.cuts.items() if price and limit.keeps(one.point)]
        if limit.bytes is not None and within:
            yield from cut_between(self.cuts[max(within)].plan, max(within), limit.bytes, self._cut)

    def _filled(self, cuts: Sequence[Found], limit: Limit, ratio: float) -> Iterator[Found]:
        """Fill the dearest plans within a limit of bytes; for a limit of errors, the dearest plans beyond it."""
        within = [one for one in cuts if limit.keeps(one.expected(ratio))]
        if limit.bytes is not None:
            starts, most = within, limit.bytes
        else:
            starts = [one for one in cuts if one not in within]
            most = min((one.point.bytes for one in within), default=math.inf) - 1
        for start in starts[-_MOST_FILLED:]:
            said = self._placed(start.plan)
            for plan in filled(said.rules or OpList(), said.plan, most, lambda r: self._plan_of(self._with(r))):
                yield (found := Found.of("tuned", plan))
                if limit.error is not None and limit.keeps(found.expected(ratio)):
                    break

    def _said(self, found: Found, error: float) -> Found:
        """Say a candidate as rules, if it is not said yet; ``error`` is the predicted one that it may have."""
        return found if found.rules is not None else self._placed(found.plan)

    def _placed(self, plan: Plan) -> Found:
        rules, tuned = rules_for(plan, self.start, lambda r: self._plan_of(self._with(r)), self.prices.sensitivity)
        return Found.of("tuned", tuned, rules)


# The cost and the error of a plan, and the limit that a user sets for one of the two.


@dataclass(frozen=True)
class Point:
    """A plan's cost and error.

    Attributes:
        name: where it comes from: ``"start"``, the list to start from; ``"cut"``; or ``"tuned"``, measured as a list.
        bytes: moved by ops and casts in a call.
        predicted: relative error of the target.
        measured: the same, on batches held out; None if it was not measured.
        share: of the operations of matrix products that can run in float8, those that do.
        saved: seconds that they save by the rates of a GPU, less those in which values are quantised.
    """

    name: str
    bytes: int
    predicted: float
    measured: float | None = None
    share: float = 0.0
    saved: float = 0.0

    @property
    def error(self) -> float:
        """The measured error, or else the predicted one."""
        return self.predicted if self.measured is None else self.measured

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"measured {self.measured:.2e}"
        float8 = (
            f", {self.share:.0%} of products in float8, which saves {self.saved * 1e6:.1f} µs" if self.share else ""
        )
        return f"{self.bytes / 1e6:.2f} MB, predicted error {self.predicted:.2e}, {measured}{float8}"


@dataclass(frozen=True)
class Budget:
    """A limit as a user sets it; one of the two.

    Attributes:
        error: the largest relative error of the target; of the plans within it, the one of fewest bytes is best.
        bytes: the largest share of the bytes that the list to start from moves; of the plans within it, the one of the
            least error is best.

    Raises:
        ValueError: both are given, or none; or it is not above 0.
    """

    error: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.error, self.bytes) if value is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ArgumentError(f"a budget is an error or a share of bytes, above 0, not {self}")


@dataclass(frozen=True)
class Limit:
    """A limit of one search.

    Attributes:
        error: the largest relative error of the target; None if something else is limited.
        bytes: the most bytes moved; None if something else is limited.
        share: the least share of products in float8; likewise.
        bandwidth: bytes moved in a second, by which a second that products in float8 save counts.
    """

    error: float | None = None
    bytes: float | None = None
    share: float | None = None
    bandwidth: float = 0.0

    def __str__(self) -> str:
        if self.share is not None:
            return f"at least {self.share:.0%} of products in float8"
        return f"an error of {self.error:.2e}" if self.error is not None else f"{(self.bytes or 0) / 1e6:.2f} MB"

    def keeps(self, point: Point) -> bool:
        """True if a plan is within the limit; by its predicted error if it was not measured."""
        if self.share is not None:
            return point.share >= self.share
        if self.error is not None:
            return point.error <= self.error
        return point.bytes <= (self.bytes or 0)

    def rank(self, point: Point) -> tuple[float, float]:
        """Return the order among plans within the limit; the least is best."""
        cost = self.cost(point)
        return (cost, point.error) if self.error is not None else (point.error, cost)

    def cost(self, point: Point) -> float:
        """Return the bytes moved, less those of the time that float8 saves."""
        return point.bytes - self.bandwidth * point.saved


# Say a measured placement as rules of an op list: by module path and op, with ``*`` for layers that agree.

Group = tuple[str, str]  # a module path and an op
_SIDES = {Precision.LOW: "low", Precision.FLOAT32: "float32"}
_MOST_ROUNDS = 8


def rules_for(
    wanted: Plan, start: Plan, convert: Callable[[OpList], Plan], sensitivity: Sensitivity
) -> tuple[OpList, Plan]:
    """Find rules by which a conversion places what it computes as ``wanted`` does, and the plan that follows from them.

    A rule is added for each module and op that is placed otherwise without it. What one rule draws along may need
    another, so this is repeated until no rule is left to add.

    Nodes of one module and op of ``wanted`` run in one precision. ``start`` follows from the base list alone, and
    ``convert`` gives the plan that follows from rules laid over it. The sensitivity is for the reasons.
    """
    said, chosen = _Wanted(wanted, sensitivity), set[Group]()
    views = {group_of(node) for node in wanted.nodes if node.decision.category is Category.CLEAR}
    rules, plan, runs = OpList(name="tuned"), start, {node.name: node.placement.run for node in wanted.nodes}
    for _ in range(_MOST_ROUNDS):
        differs = (n for n in plan.nodes if _computes(n) and runs.get(n.name, n.placement.run) is not n.placement.run)
        differing = dict.fromkeys(map(group_of, differs))
        groups = [group for group in differing if group not in chosen and group in said.sides]
        missing = [group for group in groups if group not in views]
        # If views alone differ, it may be in a way that costs nothing.
        is_alike = plan.traffic.moved <= wanted.traffic.moved and (plan.error or 0.0) <= 1.01 * (wanted.error or 0.0)
        if not missing and not is_alike:
            missing = groups
        if not missing:
            break
        chosen.update(missing)
        rules = OpList.of({"modules": list(said.rules(chosen))}, name="tuned")
        plan = convert(rules)
    return rules, plan


def _computes(node: PlannedNode) -> bool:
    return node.placement.run in _SIDES and node.op != "getitem"


def group_of(node: PlannedNode) -> Group:
    """Return the module and the op by which a rule names a node."""
    return node.module, base_name(node.op)


@dataclass(frozen=True)
class _Wanted:
    """A plan to say as rules, and the sensitivity for their reasons."""

    plan: Plan
    sensitivity: Sensitivity

    @cached_property
    def nodes(self) -> Mapping[Group, Sequence[PlannedNode]]:
        """The nodes of each module and op that compute."""
        by_group: dict[Group, list[PlannedNode]] = {}
        for node in filter(_computes, self.plan.nodes):
            by_group.setdefault(group_of(node), []).append(node)
        return by_group

    @cached_property
    def sides(self) -> Mapping[Group, str]:
        """The precision of each module and op; those that run in both are left out."""
        runs = {group: {node.placement.run for node in nodes} for group, nodes in self.nodes.items()}
        return {group: _SIDES[own.pop()] for group, own in runs.items() if len(own) == 1}

    def rules(self, chosen: Collection[Group]) -> Iterator[dict[str, Any]]:
        """The rules as the data of a list: one for layers that agree, if several are chosen."""
        families: dict[Group, list[Group]] = {}
        for module, op in self.sides:
            layered = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)  # ``h.*.attn`` for ``h.3.attn``
            families.setdefault((layered, op), []).append((module, op))
        rules: dict[tuple[str, str], list[Group]] = {}
        for (path, _), members in families.items():
            asked = [group for group in members if group in chosen]
            agree = len({self.sides[group] for group in members}) == 1
            together = [(path, members)] if agree and len(asked) > 1 else [(group[0], [group]) for group in asked]
            for own_path, groups in together:
                rules.setdefault((own_path, self.sides[groups[0]]), []).extend(groups)
        for (path, side), groups in rules.items():
            ops = sorted({op for _, op in groups})
            yield {"path": path or "re:^$", "category": side, "reason": self._reason(groups, side), "ops": ops}

    def _reason(self, groups: Sequence[Group], side: str) -> str:
        nodes = [node for group in groups for node in self.nodes[group]]
        total = f"the {self.sensitivity.of}'s error of {self.plan.error or 0.0:.1e}"
        if side == "low":
            error = math.hypot(*(node.error or 0.0 for node in nodes))
            return f"tuned: adds {error:.1e} to {total}"
        names = {effect.name for effect in self.sensitivity.effects}
        error = math.hypot(*(self.sensitivity[node.name].error for node in nodes if node.name in names))
        return f"tuned: in 16 bits it would add {error:.1e} to {total}" if error else "tuned"


# Spend the bytes that a plan leaves of a limit: run further ops in float32, first those that add most to its error.

_MOST_GROUPS = 16


def filled(rules: OpList, plan: Plan, most: float, convert: Callable[[OpList], Plan]) -> Iterator[Plan]:
    """Yield plans of ever less error that move at most ``most`` bytes, each with one more module's op in float32.

    A minimum cut finds the plans on the convex hull of bytes and error alone, and adds up squared errors as if they
    were independent. Here an op counts by how much the plan's squared error falls without it, other errors included.

    ``convert`` gives the plan that follows from rules laid over the base list, as ``plan`` does from ``rules``.
    """
    tried: set[Group] = set()
    improved = True
    while improved:
        improved = False
        for group in by_share(plan):
            if group in tried:
                continue
            if len(tried) == _MOST_GROUPS:
                return
            tried.add(group)
            further = rules.merged(raised(group))
            candidate = convert(further)
            if candidate.traffic.moved <= most and (candidate.error or 0.0) < (plan.error or 0.0):
                rules, plan, improved = further, candidate, True
                yield plan
                break


def by_share(plan: Plan) -> list[Group]:
    """Return the ops of each module that run in 16 bits, by how much the plan's squared error falls without theirs."""
    effects: dict[Group, list[Signature]] = {}
    for node in plan.nodes:
        if node.effect and node.placement.run is Precision.LOW:
            effects.setdefault(group_of(node), []).append(node.effect)
    whole = added(node.effect for node in plan.nodes if node.effect)
    parts = {group: zip(added(own), whole, strict=True) for group, own in effects.items()}
    falls = {group: sum(one * (2 * total - one) for one, total in pairs) for group, pairs in parts.items()}
    return sorted((group for group, fall in falls.items() if fall > 0), key=lambda group: -falls[group])


def raised(group: Group) -> OpList:
    """Return the rule that runs an op of a module in float32."""
    module, op = group
    return OpList.of({"modules": [{"path": module or "re:^$", "category": "float32", "ops": [op]}]})


# Find plans between those of a minimum cut: run one op more in float32, and cut the rest anew at a lower price.

_MOST_TRIED = 16  # ops a round
_LOWER = (1.0, 0.5, 0.25)  # prices over that of the plan before
_MOST_FURTHER_CUTS = 96


def cut_between(plan: Plan, price: float, most: float, cut: Callable[[OpList, float], Plan]) -> Iterator[Plan]:
    """Yield plans that move at most ``most`` bytes, each of less error than the one before.

    A minimum cut finds the plans on the convex hull of bytes and squared error alone, and may leave much of a limit
    unused. With one op more in float32, the cuts of all other ops lie on another hull, and one may be nearer the limit.

    ``cut`` gives the plan of fewest bytes, by rules laid over the base list and a price of an error, as ``plan`` is one
    at ``price``.
    """
    rules, cuts = OpList(), 0
    while True:
        candidates: list[tuple[float, OpList, float, Plan]] = []
        for group in by_share(plan)[:_MOST_TRIED]:
            further = rules.merged(raised(group))
            for lower in _LOWER:
                if cuts == _MOST_FURTHER_CUTS:
                    break
                cuts += 1
                one = cut(further, lower * price)
                if one.traffic.moved <= most:
                    candidates.append((one.error or 0.0, further, lower * price, one))
                    break
        best = min(candidates, key=lambda each: each[0], default=None)
        if best is None or best[0] >= (plan.error or 0.0):
            return
        _, rules, price, plan = best
        yield plan


_MOST_CUTS = 20
_MOST_MEASURED = 5
_LAST_DECADE = 9
_SLACK = 1.25  # an error predicted to be larger by this factor may yet be smaller
_CLOSE = 1.05  # prices that are not told apart
_MOST_FILLED = 4  # plans


def _next(candidates: Sequence[Found], limit: Limit, ratios: Sequence[float], tried: Sequence[Found]) -> Found | None:
    """Return the plan to measure next: the best that should keep the limit, by the errors so far; None if none is left.

    Beyond a limit of errors, a plan would be kept by the chance of the few batches that are held out. Within a limit of
    bytes, one that is predicted to be a little worse may be better.
    """
    best = min((limit.rank(one.point) for one in tried if limit.keeps(one.point)), default=None)
    ratio = statistics.median(ratios)
    for slack in (1.0,) if limit.bytes is None else (1.0, _SLACK):
        expected = [one.expected(ratio / slack) for one in candidates]
        fits = [(limit.rank(point), i) for i, point in enumerate(expected) if limit.keeps(point)]
        fits = [pair for pair in fits if best is None or pair[0] < best]
        if fits:
            return candidates[min(fits)[1]]
    return None


def _around(cuts: Sequence[Found], limit: Limit, ratio: float) -> list[Found]:
    """The plans within the limit that are best, and the nearest beyond it."""
    order = sorted(cuts, key=lambda one: limit.rank(one.expected(ratio)))
    kept = [one for one in order if limit.keeps(one.expected(ratio))]
    beyond = [one for one in reversed(order) if one not in kept]
    return [*kept[:_MOST_MEASURED], *beyond[:1]]
