"""``bisect``: find a small set of ops that must stay in float32 for a metric to hold."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from autocastfx.conversion import convert, convert_again
from autocastfx.errors import BisectError, UnmatchedRuleWarning
from autocastfx.numerics.evaluations import Evaluations
from autocastfx.numerics.place import Place, places_of, search_order
from autocastfx.policy.op_list import OpList, OpListLike
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["Bisection", "bisect"]

Metric = Callable[[AmpModule], float]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Bisection:
    """The places that must stay in float32.

    Attributes:
        places: in graph order; if the metric never gets worse with more float32, each of them is needed.
        metric: the metric with these places in float32.
        low, float32: the metric with all places in 16 bits, and with all in float32.
        evaluations: the number of evaluations of the metric, not counting those read from a file.
        op_list: the op list to add: ``convert(model, ..., op_list=["default", found.op_list])``.
    """

    places: tuple[Place, ...]
    metric: float
    low: float
    float32: float
    evaluations: int
    op_list: OpList

    def __str__(self) -> str:
        kept = ", ".join(map(str, self.places)) or "nothing"
        return (
            f"float32 for {kept}: metric {self.metric:.4g}, {self.low:.4g} without, {self.float32:.4g} with all in "
            f"float32; {self.evaluations} evaluations"
        )


def bisect(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor | None,
    metric: Metric,
    tolerance: float,
    *,
    op_list: OpListLike = "default",
    state: str | os.PathLike[str] | None = None,
    label: str = "",
    report: Report | None = None,
    **options: Any,
) -> Bisection:
    """Find the ops that must run in float32 for ``metric`` to be at most ``tolerance``.

    Places (ops inside modules) are searched in an order: first the one at which :func:`find_overflow` finds a fault
    with the example inputs, then those of the largest predicted errors if ``sensitivity=`` is among the options, then
    those whose nodes move fewer bytes. So of several that mend the metric alike, the fault's is kept, or the predicted
    worst, or the cheapest. Bisection finds the shortest prefix of places that makes the metric hold when in
    float32. The last place of this prefix is needed: it is kept, and the search starts again. So ``k`` places out of
    ``n`` take about ``k * log2(n)`` evaluations. The search assumes that more float32 never makes the metric worse. If
    it does, the metric still holds with the result, but the set may not be the smallest.

    The model is captured once; each evaluation converts the captured graph again.

    Args:
        model: as for ``convert``.
        example_inputs: as for ``convert``.
        metric: a function of the converted model; smaller is better, and NaN never holds. It must be deterministic: fix
            its data and seeds.
        tolerance: the largest metric that holds.
        op_list: the op list to start from.
        state: a JSON file that stores each evaluation at once, so that an interrupted search can continue. Use another
            file for another metric, other weights or other data; a file of another graph, op list or label is refused.
        label: text that identifies the search, such as a name for the metric and its data.
        report: called before each evaluation with the number of evaluations made, and the most that are still needed
            for the current place.
        options: further arguments of ``convert``.

    Raises:
        TypeError: ``metric`` cannot be called, or ``tolerance`` is not a number.
        ValueError: ``tolerance`` is not finite.
        BisectError: the metric does not hold even with all places in float32.
        EvaluationsError: ``state`` is not a file of this search.
        NodeError: a node raises with the example inputs.
        OSError: ``state`` cannot be read or written.
    """
    if not callable(metric):
        raise TypeError(f"metric is a function of the converted model, not {metric!r}")
    if not math.isfinite(tolerance):
        raise ValueError(f"tolerance is a finite number, not {tolerance!r}")
    lists: list[Any] = list(op_list) if isinstance(op_list, Sequence) and not isinstance(op_list, str) else [op_list]
    first = convert(model, example_inputs, op_list=lists, **options)

    def make(places: Sequence[Place]) -> AmpModule:
        rules = op_list_of(places) if places else OpList()
        again = convert_again(first, rules)
        if again is not None:
            return again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnmatchedRuleWarning)  # the first conversion has warned
            return convert(model, example_inputs, op_list=[*lists, rules], **options)

    def order() -> Sequence[Place]:
        return search_order(first, places, _arguments(example_inputs, options.get("example_kwargs")))

    plan, places = first.plan, places_of(first.plan)
    kind = {"op list": plan.op_list, "dtype": plan.low, "device": plan.device, "label": label}
    evaluations = Evaluations.of(
        Path(state) if state is not None else None, {**kind, "places": [str(place) for place in places]}
    )
    return _Search(make, metric, evaluations, report).run(places, order, tolerance)


def _arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """The example call, as ``convert`` understands it; None if there is none."""
    if isinstance(inputs, Mapping):
        return (), cast("Mapping[str, Any]", inputs)
    if inputs is None and kwargs is None:
        return None
    args: tuple[Any, ...] = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return args, kwargs or {}


@dataclass
class _Search:
    make: Callable[[Sequence[Place]], AmpModule]
    metric: Metric
    evaluations: Evaluations
    report: Report | None
    made: int = 0

    def run(self, places: tuple[Place, ...], order: Callable[[], Sequence[Place]], tolerance: float) -> Bisection:
        low, wide = self.measure((), 1), self.measure(places, 0)
        if not wide <= tolerance:
            raise BisectError(
                f"with all {len(places)} places in float32 the metric is {wide:g}, which is beyond the tolerance of "
                f"{tolerance:g}: precision is not the cause, or the tolerance is too small for what stays in 16 bits."
            )
        kept: tuple[Place, ...] = ()
        now, searched = low, () if low <= tolerance else order()
        while not now <= tolerance:
            rest = tuple(place for place in searched if place not in kept)
            fails, holds = 0, len(rest)  # lengths of prefixes
            while holds - fails > 1:
                middle = (fails + holds) // 2
                left = math.ceil(math.log2(holds - fails))
                if self.measure((*kept, *rest[:middle]), left) <= tolerance:
                    holds = middle
                else:
                    fails = middle
            kept = (*kept, rest[holds - 1])
            now = self.measure(kept, 0)
        ordered = tuple(place for place in places if place in kept)
        reason = f"found by bisection: {now:.4g} with this list, {low:.4g} without, where {tolerance:.4g} is tolerated"
        return Bisection(ordered, now, low, wide, self.made, op_list_of(ordered, reason))

    def measure(self, places: tuple[Place, ...], left: int) -> float:
        key = " ".join(sorted(map(str, places)))
        if key not in self.evaluations.known:
            if self.report is not None:
                self.report(self.made, left)
            self.evaluations.keep(key, float(self.metric(self.make(places))))
            self.made += 1
        return self.evaluations.known[key]


def op_list_of(places: Sequence[Place], reason: str = "tried by bisection") -> OpList:
    """Make an op list that runs the places in float32.

    Args:
        places: ops inside modules.
        reason: the reason of the rules.
    """
    by_module: dict[str, list[str]] = {}
    for place in places:
        by_module.setdefault(place.module, []).append(place.op)
    root = by_module.pop("", [])
    data: dict[str, Any] = {"deny": [{"reason": reason, "ops": root}]} if root else {}
    modules: list[Mapping[str, Any]] = [
        {"path": path, "category": "float32", "ops": ops, "reason": reason} for path, ops in by_module.items()
    ]
    return OpList.of({**data, **({"modules": modules} if modules else {})}, name="bisection")
