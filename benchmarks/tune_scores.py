"""Cheaper scores of nodes than measured effects, and the plans that ``tune``'s search chooses by them.

A score is a number for each value of the float32 graph, by what rounding it to 16 bits changes (δ) and the gradient of
the loss by it (g). A plan pays it where a node makes the value in 16 bits, and where one reads it so.

- ``g2d2``: the root of the sum of g²·δ², as ModelOpt's AutoQuantize has it.
- ``first order``: |g·δ|, by how much the loss changes to first order.
- ``local error``: ‖δ‖ over the norm of the value; no gradient.
- ``random``: drawn from 0 to 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import Sensitivity
from autocastfx.capture.call import CallSignature
from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.capture.measure import apart, written_outside
from autocastfx.errors import SensitivityError
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import uses
from autocastfx.numerics.compare import TargetError
from autocastfx.numerics.flat_graph import FlatGraph, flatten
from autocastfx.numerics.logprob_gap import loss_of
from autocastfx.numerics.plan_search import Found, Limit, PlanSearch, Point
from autocastfx.numerics.sensitivity import captured_of
from autocastfx.passes.analysis.units import Ports
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan
from benchmarks.tune_models import Case

__all__ = ["SCORES", "at_bytes", "cheapest", "random_scores", "scored", "scores"]

SCORES = ("g2d2", "first order", "local error")

Scores = Mapping[str, tuple[float, ...]]  # by the name of a value, one number for each batch


def scores(model: autocastfx.AmpModule, case: Case, batches: Iterable[Any], low: torch.dtype) -> dict[str, Scores]:
    """Compute the scores of all values, by the name of the score.

    Args:
        model: converted from the float32 model, whose captured graph is run in float32.
        case: gives the loss.
        batches: those that a sensitivity is measured on.
        low: the 16-bit dtype.
    """
    found: dict[str, dict[str, tuple[float, ...]]] = {name: {} for name in SCORES}
    for batch in batches:
        for value, tensors in _values(model, case, batch):
            for name, score in zip(SCORES, _scores(tensors, low), strict=True):
                found[name][value] = (*found[name].get(value, ()), score)
    return {**found}


def random_scores(names: Iterable[str], seed: int, batches: int) -> Scores:
    """Draw a score for each value, the same for all batches."""
    generator = random.Random(seed)
    return {name: (generator.random(),) * batches for name in sorted(names)}


def scored(sensitivity: Sensitivity, by_value: Scores) -> Sensitivity:
    """Put scores in place of the measured effects: of the value that a node makes, and of those that it reads.

    What was not measured stays so, and so does what overflows. Gradients are not scored.
    """
    none = (0.0,) * sensitivity.batches
    effects = (
        replace(
            effect,
            computes=by_value.get(effect.name, none) if effect.computes else (),
            reads={name: by_value.get(name, none) for name in effect.reads},
            returns={},
        )
        for effect in sensitivity.effects
    )
    return replace(sensitivity, probes=1, effects=tuple(effects))


def cheapest(search: PlanSearch) -> Plan:
    """The plan where errors cost nothing: the fewest bytes and the least time of float32 products."""
    search._at(0.0)
    return search.plans[0.0]


def at_bytes(search: PlanSearch, most: float, judge: TargetError) -> Found | None:
    """Find the plan of the least score that moves at most so many bytes, as rules say it; None if there is none.

    It is ``tune``'s own search: up to five plans of the least scores are measured, and the best is chosen.

    Args:
        search: of one score.
        most: bytes moved.
        judge: measures plans on the batches held out.
    """
    started = Point("start", search.start.traffic.moved, search.start.error or 0.0, judge(search.base, search.low))
    try:
        return replace(search, plans={}).result(judge, Limit(bytes=most), started)[0]
    except SensitivityError:  # no plan keeps the limit
        return None


def _scores(tensors: Iterable[Tensor], low: torch.dtype) -> tuple[float, float, float]:
    """The scores of one value, in the order of ``SCORES``."""
    squares = first = error = norm = 0.0
    for tensor in tensors:
        value = tensor.detach().double()
        change = (tensor.detach().to(low).double() - value).nan_to_num_(0.0, 0.0, 0.0)  # infinite ones change nothing
        error += float(change.square().sum())
        norm += float(value.nan_to_num(0.0, 0.0, 0.0).square().sum())
        if tensor.grad is not None:
            effect = tensor.grad.double() * change
            squares += float(effect.square().sum())
            first += float(effect.sum())
    return math.sqrt(squares), abs(first), math.sqrt(error / norm) if norm else 0.0


def _values(model: autocastfx.AmpModule, case: Case, batch: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the name and the float32 tensors of each value, with gradients of the loss in ``grad``."""
    args, kwargs = case.arguments(batch)
    captured = captured_of(model._variant_for(args, kwargs))
    call = CallSignature.of(model.forward).bind(args, kwargs)
    held: dict[str, Any] = {**captured.attributes, **model._held()}
    flat = flatten(captured.graph, held.__getitem__)
    converter: Converter = model._maker.converter  # type: ignore[union-attr]
    run = _Values(flat, replace(converter, device=captured.device.type).ports)
    with random_numbers_kept(), torch.enable_grad():
        torch.manual_seed(0)
        output = run.run(*(t.detach() for t in call.tensors), enable_io_processing=False)
        loss_of(pytree.tree_unflatten(output, captured.out_spec), batch, case.loss).backward()
    for node, value in run.env.items():
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.dtype == torch.float32]
        if tensors and node.op != "output":
            yield flat.names[node], tensors


class _Values(fx.Interpreter):
    """Runs a flat graph, and keeps the gradient of each value, also where the model asks for none."""

    def __init__(self, flat: FlatGraph, ports: Ports) -> None:
        super().__init__(nn.Module(), garbage_collect_values=False, graph=flat.graph)
        self._flat, self._ports = flat, ports
        tensors = {name: held for name, held in flat.held.items() if isinstance(held, Tensor)}
        leaves = {id(held): held.detach() for held in tensors.values()}  # a tied parameter is one leaf
        buffers = {name for name, held in tensors.items() if not isinstance(held, nn.Parameter)}
        self._shared = alias_sets(flat.graph)
        self._held = {
            **flat.held,
            **{name: leaves[id(held)] for name, held in tensors.items()},
            **apart(tensors, written_outside(flat.graph, flat.held) | buffers),
        }

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._held[target]

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op == "output" or n in self._shared or self._is_statistic(n):
            return made
        return pytree.tree_map(_kept, made)

    def _is_statistic(self, node: fx.Node) -> bool:
        """True of a buffer that stays float32, as those of batch norms, which cannot have gradients."""
        if node.op != "get_attr" or isinstance(self._flat.held[str(node.target)], nn.Parameter):
            return False
        read = ((user, use) for user in node.users for use in uses(user) if use.node is node)
        return any(self._ports.stays_float32(user, use) for user, use in read)


def _kept(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    kept = value if value.requires_grad or value.is_leaf else value.detach()
    kept.requires_grad_() if kept.is_leaf else kept.retain_grad()
    return kept
