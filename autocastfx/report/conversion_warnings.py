"""The warnings about a conversion that did not find what it was told about, or will be slow."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import (
    StateWarning,
    UnmatchedMeasurementWarning,
    UnmatchedPlanWarning,
    UnmatchedRuleWarning,
    listed,
)
from autocastfx.graph.walk import all_nodes, names_stood_for
from autocastfx.plan.edited_plan import EditedPlan
from autocastfx.plan.plan import Plan, Precision, because_of
from autocastfx.plan.ranges import Range, Ranges
from autocastfx.plan.sensitivity import Effect, Sensitivity
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import MatchedRules
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category
from autocastfx.runtime.amp_module import AmpModule

_NAMED = 4  # names in a message, before the others are counted


def unmatched_in(amp_model: AmpModule, **given: Any) -> Iterator[tuple[type[Warning], str]]:
    """Yield what :func:`unmatched` does, of the graphs of a converted model."""
    captured = [one.captured for one in amp_model.variants if one.captured is not None]
    stood_for = {name for one in captured for name in names_stood_for(one.graph, one.attributes)}
    return unmatched([variant.plan for variant in amp_model.variants], stood_for, **given)


def unmatched(
    plans: Sequence[Plan],
    stood_for: Collection[str],
    *,
    ranges: Ranges | None = None,
    sensitivity: Sensitivity | None = None,
    plan: EditedPlan | None = None,
    saved: Collection[object] = (),
) -> Iterator[tuple[type[Warning], str]]:
    """Yield a sentence on measurements and lines of a plan that were given to a conversion and match none of its nodes.

    The plans are of the graphs captured so far, in which others stand for the nodes called ``stood_for``. ``saved`` has
    the rules of what is kept for backward.
    """
    known = {(n.name, n.op, n.module) for one in plans for n in one.nodes}
    others = {*stood_for, *(name for one in plans for whole in one.recomposed for name in whole.replaced)}
    if ranges is not None:
        yield from _missing(known, others, ranges.values, "values", "Calibrate again.")
    if sensitivity is not None:
        yield from _missing(known, others, sensitivity.effects, "nodes", "Measure the sensitivity again.")
        yield from _unmeasured_products(plans, sensitivity)
    if plan is not None:
        for message in (plan.unmatched(plans), plan.without_float8(plans), plan.without_saved(saved)):
            if message:
                yield UnmatchedPlanWarning, message


def _unmeasured_products(plans: Sequence[Plan], sensitivity: Sensitivity) -> Iterator[tuple[type[Warning], str]]:
    """Say that products run in float8 by a recipe that was not measured: what is predicted leaves them out."""
    planned = [(n.name, n.float8) for one in plans if one.error is not None for n in one.nodes if n.float8 is not None]
    left_out = {name: one.recipe for name, one in planned if one.products and not one.errors}
    if left_out:
        measured = f"by {sensitivity.float8}" if sensitivity.float8 else "in 16 bits alone"
        yield (
            UnmatchedMeasurementWarning,
            f"the predicted error leaves out the float8 products of {len(left_out)} nodes, and is too small: they run "
            f"by {', '.join(sorted(set(left_out.values())))}, and the sensitivity was measured {measured}. Measure it "
            "with float8=…, in the list's recipe.",
        )


def _missing(
    known: Collection[Any], others: Collection[str], measured: Sequence[Range | Effect], what: str, again: str
) -> Iterator[tuple[type[Warning], str]]:
    computed = [m for m in measured if m.op not in ("placeholder", "output")]
    if missing := [m for m in computed if m.key not in known and m.name not in others]:
        first = missing[0]
        yield (
            UnmatchedMeasurementWarning,
            f"{len(missing)} of {len(computed)} measured {what} match no node of the graphs captured now, the first "
            f"being {first.name!r} ({first.op}) in module {first.module or '(root)'!r}: they were measured on another "
            f"version of the model, or in other calls. {again}",
        )


def warn_of_other_parameters(model: nn.Module, stacklevel: int) -> None:
    """Warn of parameters and buffers that are not converted, because only float32 values are.

    They are float64, or those of a model that has both 16-bit dtypes.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    named = [*model.named_parameters(), *model.named_buffers()]
    if wide := [name for name, tensor in named if tensor.dtype == torch.float64]:
        what, mend = f"the parameters of this {type(model).__name__}", "Convert the model in float32: model.float()."
        if torch.float32 in dtypes or torch.float64 not in dtypes:
            what = f"{listed(wide, _NAMED)} in this {type(model).__name__}"
            mend = "Make them float32 if that is exact enough."
        warnings.warn(
            f"{what} are float64, and only float32 values are converted: what they compute stays as it is. {mend}",
            StateWarning,
            stacklevel=stacklevel,
        )
    if dtypes == set(LOW_DTYPES):
        warnings.warn(
            f"the parameters of this {type(model).__name__} are {' and '.join(sorted(map(dtype_name, dtypes)))} "
            "already, and only float32 values are converted: what they compute stays as it is. Give them one dtype, or "
            "convert the model in float32, whose parameters stay the optimizer's masters.",
            StateWarning,
            stacklevel=stacklevel,
        )


def warn_of_slow_kernels(amp_model: AmpModule, dtype: torch.dtype) -> None:
    """Warn of float16 convolutions on a CPU."""
    if dtype != torch.float16 or not amp_model._shown or amp_model.plan.device != "cpu":
        return
    low = (n for n in amp_model.plan.nodes if n.placement.run is Precision.LOW and n.captured != amp_model.plan.low)
    if any(n.op.startswith("conv") for n in low):
        warnings.warn(
            "float16 convolutions on a CPU are hundreds of times slower than float32 ones; use dtype=torch.bfloat16 "
            "there.",
            stacklevel=3,
        )


def warn_of_unmatched_rules(amp_model: AmpModule, op_list: OpList, facts: KernelFacts, stacklevel: int) -> None:
    """Warn of each of the user's own rules that matches no node."""
    matched = MatchedRules(op_list)
    captured = [(v.captured, v) for v in amp_model.variants if v.captured is not None]
    for capture, variant in captured:
        match_graph(matched, capture.graph, capture.attributes, variant.graph, variant.plan, facts)
    plans = [variant.plan for _, variant in captured]
    is_trained = any(v.mode != "eval" for _, v in captured)
    so_far = ""
    if captured and any(matched.unmatched()):  # another mode may have what this one lacks, as dropout
        others = amp_model._others()
        for variant in others:
            if (one := variant.captured) is not None:
                match_graph(matched, one.graph, one.attributes, variant.graph, variant.plan, facts)
        is_evaluated = all(variant.mode == "eval" for variant in (*amp_model.variants, *others))
        so_far = " Captured so far: eval mode alone." if is_evaluated else ""
    unmatched = [f"{message}{so_far}" for message in matched.unmatched()]
    messages = (*unmatched, *without_float8(op_list, plans)) if captured else ()
    if is_trained:
        messages = (*messages, *without_saved(op_list, plans))
    for message in messages:
        warnings.warn(message, UnmatchedRuleWarning, stacklevel=stacklevel + 1)


def without_effect(amp_model: AmpModule, *, weights: str, fold: str) -> Iterator[str]:
    """Yield a sentence on each thing that a conversion was asked for and that changes nothing in any of its graphs."""
    nodes = [node for variant in amp_model.variants for node in variant.plan.nodes]
    low = [node for node in nodes if node.placement.run is Precision.LOW]
    wide = [node for node in nodes if "float32" in node.captured and node not in low]
    if wide and not low:
        whys = Counter(f"{node.op}: {because_of(node)}" for node in wide).most_common(_NAMED)
        yield f"no op of the model runs in 16 bits. {'; '.join(why for why, _ in whys)}"
        return
    if weights == "cached" and not any(variant.has_copies for variant in amp_model.variants):
        yield 'weights="cached" changes nothing: no op reads a parameter in 16 bits'
    if fold == "kernel" and not any(node.decision.category is Category.DENY for node in low):
        yield 'fold="kernel" changes nothing: no op that computes in float32 stands between ops in 16 bits'


def without_saved(op_list: OpList, plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a sentence if a list says how values are kept for backward, and none is kept otherwise in training."""
    if op_list.saved and not any(plan.saved for plan in plans):
        yield (
            f"the op list {op_list.name} says how values are kept for backward, and nothing is kept otherwise: the "
            "model trains no parameter, its values are small, or it runs code that may do anything."
        )


def without_float8(op_list: OpList, plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a sentence if a list asks for float8, a preset too, and no product of its ``plans`` runs in it."""
    nodes = [node for plan in plans for node in plan.nodes if node.float8 is not None]
    devices = {"", *(plan.device for plan in plans)}
    asked = any(rule.effect.products != () and rule.device in devices for rule in op_list.float8)
    if not asked or any(node.products for node in nodes):
        return
    whys = Counter(str(one.why) for n in nodes if n.float8 is not None for one in n.float8.in_16_bits[:1])
    first = [f"{why} ({count})" for why, count in whys.most_common(_NAMED)]
    more = f"; and {len(whys) - _NAMED} other reasons" if len(whys) > _NAMED else ""
    said = f"; {'; '.join(first)}{more}. Sizes are those of the example inputs" if first else ": it has no such product"
    yield f"the op list {op_list.name} asks for float8, and no product of the model runs in it{said}."


def match_graph(
    matched: MatchedRules,
    captured: fx.Graph,
    attributes: Mapping[str, Any],
    converted: fx.Graph,
    plan: Plan,
    facts: KernelFacts,
) -> None:
    """Add the nodes of a captured graph to ``matched``, with those that the conversion has recomposed of them."""
    nodes = list(all_nodes(captured, attributes))
    wholes = {whole.node for whole in plan.recomposed}  # lists speak of these, too
    nodes += [node for node in converted.nodes if node.name in wholes]
    others = {other for node in nodes if (other := facts.stands_for(node)) is not None}
    rules = (matched.op_list.rule(other, plan.device) for other in others)
    decided = {node.decision.source for node in plan.nodes} | {rule.source for rule in rules if rule is not None}
    matched.add(plan.device, nodes, decided)
    matched.add_saved(plan.device, converted.nodes)
