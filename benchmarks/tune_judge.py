"""Judge plans of one model: conversions by lists, by chosen nodes and by rules, and their true errors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

import autocastfx
from autocastfx import OpList, Sensitivity
from autocastfx.conversion import convert_captured
from autocastfx.errors import PlanError
from autocastfx.graph.alias import alias_sets
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.plan_search import Found, PlanSearch
from autocastfx.numerics.sensitivity import Measuring, captured_of
from autocastfx.numerics.tune import Tuned
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.edited_plan import read_plan
from autocastfx.plan.plan import Forced, Plan, PlannedNode, Precision, Prices
from autocastfx.policy.op_list import load_op_list
from benchmarks.models.tuned import Case

NODES, PLANS = 24, 8
_MOVES = (Precision.LOW, Precision.FLOAT32)
_FREE = ("allow", "deny", "infer")


@dataclass(frozen=True)
class Judged:
    """The bytes that a plan moves, and its true error on each judged batch. Bytes are 0 where they are not counted."""

    bytes: int
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The root mean square over the batches."""
        return math.sqrt(sum(error * error for error in self.errors) / len(self.errors))


def measured(model: autocastfx.AmpModule, case: Case, batches: Iterable[Any], probes: int = 8) -> Sensitivity:
    """Measure the sensitivity of the gradient on batches."""
    measuring = Measuring(model, case.loss, "gradient", probes, case.inputs)
    for batch in batches:
        measuring.add(batch)
    assert measuring.found is not None
    return measuring.found


@dataclass
class Bench:
    """The judge of plans of one model.

    Attributes:
        model: in float32.
        case: its loss and inputs.
        dtype: name of the 16-bit dtype.
        found: the sensitivity measured on the batches to tune on.
        judged: batches that neither training nor ``found`` has seen.
        base: converted by the default list.
        there: the sensitivity on the judged batches.
        open: the nodes whose precision may be chosen, in groups that share a storage: they have one precision.
    """

    model: nn.Module
    case: Case
    dtype: str
    found: Sensitivity
    judged: Sequence[Any]
    base: autocastfx.AmpModule = field(init=False)
    there: Sensitivity = field(init=False)
    open: list[list[PlannedNode]] = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.converted()
        self.there = measured(self.base, self.case, self.judged)
        names = {e.name for e in self.there.effects} & {e.name for e in self.found.effects}
        roots = self._roots()
        groups: dict[str, list[PlannedNode]] = {}
        for node in self.base.plan.nodes:
            groups.setdefault(roots.get(node.name, node.name), []).append(node)
        self.open = [group for group in groups.values() if all(n.name in names and _is_open(n) for n in group)]
        given = (self.case.loss, "gradient", self.case.inputs)
        self._judges = [TargetDistance(self.model, [batch], *given) for batch in self.judged]

    def _roots(self) -> dict[str, str]:
        """By name of a node that shares a storage which is written into: the name of the one that made it."""
        captured = captured_of(self.base.variants[0])
        return {node.name: shared.root.name for node, shared in alias_sets(captured.graph).items()}

    def converted(self, **options: Any) -> autocastfx.AmpModule:
        """Convert the model with options of ``convert``."""
        args, kwargs = self.case.arguments(self.judged[0])
        return autocastfx.convert(self.model, args, kwargs or None, dtype=self.dtype, **options)

    def judge(self, amp_model: autocastfx.AmpModule) -> Judged:
        """Measure the true error on each judged batch."""
        low = getattr(torch, self.dtype)
        return Judged(amp_model.plan.traffic.moved, tuple(judge(amp_model, low) for judge in self._judges))

    def tuned(self, tuned: Tuned) -> Judged:
        """Judge what ``tune`` found."""
        converter = replace(self._converter, op_list=tuned.op_list, fold=tuned.options["fold"])
        return self.judge(_again(self.base, converter))

    @property
    def _converter(self) -> Converter:
        return cast("Converter", self.base._original.converter)

    def search(self, sensitivity: Sensitivity, prices: Prices) -> PlanSearch:
        """Search among the plans of the default list, with other scores of the nodes and the same prices of bytes."""
        args, kwargs = self.case.arguments(self.judged[0])
        variant = self.base._variant_for(args, kwargs)
        return PlanSearch(self.base, variant, replace(prices, sensitivity=sensitivity), getattr(torch, self.dtype))

    def said(self, search: PlanSearch, found: Found) -> Judged:
        """Judge a plan that is said in rules."""
        return self.judge(_again(self.base, search._with(found.rules or OpList())))

    def with_low(self, low: Iterable[str], sensitivity: Sensitivity | None = None) -> autocastfx.AmpModule | None:
        """Convert with these nodes in 16 bits, and all others that may be chosen in float32.

        Args:
            low: names of nodes.
            sensitivity: what predicts the plan's error; that of the judged batches by default.
        """
        chosen, may = set(low), {n.name for n in self.base.plan.nodes if n.placement.run in _MOVES}
        nodes = (_placed(n, n.name in chosen) if n.name in may else n for n in self.base.plan.nodes)
        plan: Plan = replace(self.base.plan, nodes=tuple(nodes))
        converter = replace(self._converter, prices=Prices(sensitivity or self.there))
        try:
            return _again(self.base, replace(converter, plan=read_plan(plan), op_list=load_op_list(self.dtype)))
        except PlanError:
            return None

    def spearman(self) -> tuple[float, int]:
        """Rank single nodes by their predicted and by their true errors, both on the judged batches."""
        from scipy.stats import spearmanr

        chosen = random.Random(0).sample(self.open, min(NODES, len(self.open)))
        pairs: list[tuple[float, float]] = []
        for group in chosen:
            amp_model = self.with_low(node.name for node in group)
            if amp_model is not None and amp_model.plan.error is not None:
                pairs.append((amp_model.plan.error, self.judge(amp_model).error))
        predicted, true = zip(*pairs, strict=True)
        return float(spearmanr(predicted, true).statistic), len(pairs)

    def ratios(self) -> tuple[list[float], list[float]]:
        """The predicted over the true error, on the judged batches, of whole random plans.

        Returns:
            With predictions from the judged batches themselves, and from those tuned on.
        """
        generator, here, unseen = random.Random(1), list[float](), list[float]()
        while len(here) < PLANS:
            share = generator.uniform(0.2, 1.0)
            low = [node.name for group in self.open if generator.random() < share for node in group]
            amp_model, other = self.with_low(low), self.with_low(low, self.found)
            if amp_model is not None and other is not None and amp_model.plan.error:
                true = self.judge(amp_model).error
                here.append(amp_model.plan.error / true)
                unseen.append((other.plan.error or 0.0) / true)
        return here, unseen


def _again(base: autocastfx.AmpModule, converter: Converter) -> autocastfx.AmpModule:
    again = convert_captured(base, converter)
    assert again is not None
    return again


def _is_open(node: PlannedNode) -> bool:
    category, source = str(node.decision.category), node.decision.source
    return category in _FREE and not isinstance(source, Forced) and node.placement.run in _MOVES


def _placed(node: PlannedNode, is_low: bool) -> PlannedNode:
    run = Precision.LOW if is_low else Precision.FLOAT32
    return replace(node, placement=replace(node.placement, run=run, store=run, as_stored=()))
