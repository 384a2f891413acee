"""``bisect``: find a small set of ops that must stay in float32 for a metric to hold."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import inputs_of
from autocastfx.capture.leave_intact import isolated
from autocastfx.conversion import convert, convert_again
from autocastfx.errors import ArgumentError, ArgumentTypeError, BisectError, EvaluationsError, UnmatchedRuleWarning
from autocastfx.files import parsed_json, read_whole, write_whole
from autocastfx.graph.node import attributes_of
from autocastfx.graph.walk import walk
from autocastfx.numerics.find_overflow import Overflow, find_overflow
from autocastfx.plan.plan import Plan, PlannedNode, Precision, joint_error
from autocastfx.plan.proposed_list import rules_over
from autocastfx.policy.op_list import OpList, OpListLike
from autocastfx.report.comparison import Deviation
from autocastfx.report.lint.roofline import work_of
from autocastfx.runtime.amp_module import AmpModule


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
        ValueError: ``tolerance`` is not finite, or a ``plan`` is given.
        BisectError: the metric does not hold even with all places in float32.
        EvaluationsError: ``state`` is not a file of this search.
        NodeError: a node raises with the example inputs.
        OSError: ``state`` cannot be read or written.
    """
    if not callable(metric):
        raise ArgumentTypeError(f"metric is a function of the converted model, not {metric!r}")
    if not math.isfinite(tolerance):
        raise ArgumentError(f"tolerance is a finite number, not {tolerance!r}")
    if options.get("plan") is not None:
        raise ArgumentError("bisect searches rules of an op list, over which a plan wins: leave plan out.")
    lists: list[Any] = list(op_list) if isinstance(op_list, Sequence) and not isinstance(op_list, str) else [op_list]
    first = convert(model, example_inputs, op_list=lists, **options)
    if not first.variants:
        metric(first)  # the first call captures

    def make(places: Sequence[OpInModule]) -> AmpModule:
        rules = op_list_of(places, first.plan) if places else OpList()
        again = convert_again(first, rules)
        if again is not None:
            return again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnmatchedRuleWarning)  # the first conversion has warned
            return convert(model, example_inputs, op_list=[*lists, rules], **options)

    def order() -> Sequence[OpInModule]:
        kwargs = options.get("example_kwargs")
        is_given = example_inputs is not None or kwargs is not None
        return search_order(first, places, inputs_of(example_inputs, kwargs) if is_given else None)

    plan, places = first.plan, places_of(first.plan)
    search: dict[str, Any] = {"op list": plan.op_list, "dtype": plan.low, "device": plan.device, "label": label}
    search["places"] = [str(place) for place in places]
    evaluations = Evaluations.of(Path(state) if state is not None else None, search)
    return _Search(plan, make, metric, evaluations, report).run(places, order, tolerance)


# Places that ``bisect`` can run in float32, and the order in which it searches them.

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, order=True)
class OpInModule:
    """An op inside a module: all its nodes there, which one rule of an op list covers.

    At the root ``module`` is empty. The rule is then one for the op in all modules, unless a narrower one decides
    there.
    """

    module: str
    op: str

    def __str__(self) -> str:
        return f"{self.module}.{self.op}" if self.module else self.op


def places_of(plan: Plan) -> tuple[OpInModule, ...]:
    """Return the places whose nodes run in 16 bits, in graph order."""
    low = (node for node in plan.nodes if node.placement.run is Precision.LOW)
    return tuple(dict.fromkeys(OpInModule(node.module, node.op) for node in low))


def search_order(amp_model: AmpModule, places: Sequence[OpInModule], call: Call | None) -> tuple[OpInModule, ...]:
    """Return ``places`` of a model's plan in the order of preference among those that mend a metric alike.

    First come those of the node at which ``call``, if there is one, overflows; then those of larger predicted errors,
    where the plan has any; then those that move fewer bytes, which float32 doubles; then those that come earlier in the
    graph.

    Raises:
        NodeError: a node raises in the call.
    """
    overflow = find_overflow(amp_model, *call[0], **call[1]) if call is not None else None
    faulty = set(_at_fault(overflow, amp_model.plan)) if overflow else set[OpInModule]()
    errors, moved = _predicted(amp_model.plan), _bytes_moved(amp_model)
    return tuple(sorted(places, key=lambda p: (p not in faulty, -errors.get(p, 0.0), moved[p])))  # which is stable


def _at_fault(overflow: Overflow, plan: Plan) -> Iterator[OpInModule]:
    readers = {name for cast in plan.casts if cast.name == overflow.name for name in cast.readers}
    for node in plan.nodes:
        if node.name == overflow.name or node.name in readers:
            yield OpInModule(node.module, node.op)


def _predicted(plan: Plan) -> dict[OpInModule, float]:
    """The predicted errors of places; none without a sensitivity."""
    nodes: dict[OpInModule, list[PlannedNode]] = {}
    for node in plan.nodes:
        nodes.setdefault(OpInModule(node.module, node.op), []).append(node)
    return {place: error for place, planned in nodes.items() if (error := joint_error(planned)) is not None}


def _bytes_moved(amp_model: AmpModule) -> Counter[OpInModule]:
    """The bytes that the nodes of each place read and write; none for a model that was not captured yet."""
    moved, plan, graph = Counter[OpInModule](), amp_model.plan, amp_model.graph
    places = {node.name: OpInModule(node.module, node.op) for node in plan.nodes}
    for one in walk(graph, attributes_of(amp_model, graph)):
        if one.name in places:
            moved[places[one.name]] += work_of(one.node).bytes
    return moved


# Store the evaluations of a bisection in a file, so that an interrupted search can continue.

_FORMAT = 1


@dataclass
class Evaluations:
    """The evaluations of a search.

    Attributes:
        path: the file; None: nothing is stored.
        search: data that identifies the search.
        known: the metric, by the places in float32.
    """

    path: Path | None
    search: Mapping[str, Any]
    known: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, path: Path | None, search: Mapping[str, Any]) -> Evaluations:
        """Read the evaluations in the file, if it exists.

        Raises:
            EvaluationsError: the file is not of this format, or of another search.
            OSError: the file cannot be read.
        """
        if path is None or not path.exists():
            return cls(path, search)
        try:
            data: dict[str, Any] = parsed_json(read_whole(path))
            written, known = data["search"], {str(key): float(value) for key, value in data["known"].items()}
            fits = data["format"] == _FORMAT
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationsError(f"{path} holds no evaluations of a search: {error!r}. Give another file.") from None
        if not fits or written != search:
            other = [key for key, value in search.items() if not fits or written.get(key) != value]
            raise EvaluationsError(
                f"{path} holds the evaluations of another search: its {' and '.join(other)} differ. Give "
                "another file, or remove this one."
            )
        return cls(path, search, known)

    def keep(self, key: str, value: float) -> None:
        """Add an evaluation, and write all to the file, which is replaced as a whole.

        Raises:
            OSError: the file cannot be written.
        """
        self.known[key] = value
        if self.path is None:
            return
        text = json.dumps({"format": _FORMAT, "search": self.search, "known": self.known}, indent=1)
        write_whole(self.path, text)


# Metrics for ``bisect``: the distance of a converted model's output from the float32 model's.

METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], float]] = {
    "error": lambda ours, theirs: Deviation.of([ours], [theirs]).severity,
    "difference": lambda ours, theirs: float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0,
}


class OutputDistance:
    """A metric: the largest distance of a floating-point output tensor from the float32 model's, for one call.

    Buffers, inputs and the state of torch's random numbers are unchanged after each evaluation.
    """

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str = "error", seed: int = 0
    ) -> None:
        """Run the float32 ``model``, in the mode to measure.

        Of the kind ``"error"`` a distance is in the 2-norm, relative to the norm of the float32 tensor, and infinite if
        values overflow; of ``"difference"`` it is the largest difference of an element. ``seed`` is of the random
        numbers of each call.

        Raises:
            BisectError: the output holds no floating-point tensor.
        """
        self._args, self._kwargs, self._seed, self._distance = args, kwargs, seed, METRICS[kind]
        self._expected = self._run(model)
        if not self._expected:
            raise BisectError("the model's output holds no floating-point tensor: give a metric of your own.")

    def __call__(self, amp_model: nn.Module) -> float:
        """Measure the distance of a converted model's output."""
        pairs = zip(self._run(amp_model), self._expected, strict=True)
        distances = [self._distance(ours, theirs) for ours, theirs in pairs]
        return max(distances, key=lambda distance: (distance != distance, distance))  # NaN is worst

    def _run(self, model: nn.Module) -> list[torch.Tensor]:
        with isolated(model), torch.no_grad():
            torch.manual_seed(self._seed)
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (tuple(self._args), dict(self._kwargs)))
            output = model(*args, **kwargs)
        leaves = pytree.tree_leaves(output)
        return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


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

    places: tuple[OpInModule, ...]
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


@dataclass
class _Search:
    plan: Plan
    make: Callable[[Sequence[OpInModule]], AmpModule]
    metric: Metric
    evaluations: Evaluations
    report: Report | None
    made: int = 0

    def run(
        self, places: tuple[OpInModule, ...], order: Callable[[], Sequence[OpInModule]], tolerance: float
    ) -> Bisection:
        low, wide = self.measure((), 1), self.measure(places, 0)
        if not wide <= tolerance:
            raise BisectError(
                f"with all {len(places)} places in float32 the metric is {wide:g}, which is beyond the tolerance of "
                f"{tolerance:g}: precision is not the cause, or the tolerance is too small for what stays in 16 bits."
            )
        kept: tuple[OpInModule, ...] = ()
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
        return Bisection(ordered, now, low, wide, self.made, op_list_of(ordered, self.plan, reason))

    def measure(self, places: tuple[OpInModule, ...], left: int) -> float:
        key = " ".join(sorted(map(str, places)))
        if key not in self.evaluations.known:
            if self.report is not None:
                self.report(self.made, left)
            self.evaluations.keep(key, float(self.metric(self.make(places))))
            self.made += 1
        return self.evaluations.known[key]


def op_list_of(places: Sequence[OpInModule], plan: Plan, reason: str = "tried by bisection") -> OpList:
    """Make an op list that runs the places in float32, where ``plan`` is the one without it."""
    low = (node for node in plan.nodes if node.placement.run is Precision.LOW)
    root, modules = rules_over(node for node in low if OpInModule(node.module, node.op) in places)
    rules = [
        {"path": path, "category": "float32", "ops": ops, "reason": reason, **({"devices": device} if device else {})}
        for (path, device), ops in modules.items()
    ]
    return OpList.of({"deny": [{"reason": reason, "ops": root}] if root else [], "modules": rules}, name="bisection")
