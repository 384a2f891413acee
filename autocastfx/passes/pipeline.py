"""The pipeline that every captured graph runs through: recompose, classify, place, rewrite, verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autocastfx.capture.export import Captured
from autocastfx.capture.shape_guard import shape_guard
from autocastfx.graph.magnitude import Magnitude
from autocastfx.graph.node import copy_graph, dtypes, module_classes, subgraphs, tensors
from autocastfx.graph.op_name import op_name
from autocastfx.graph.sizes import example, largest_size, unknown_size
from autocastfx.graph.walk import CONVERTED_INSIDE
from autocastfx.passes.analysis.bytes_moved import bytes_moved
from autocastfx.passes.analysis.demands import Demands
from autocastfx.passes.analysis.distances import distance_products
from autocastfx.passes.analysis.folding import Folding
from autocastfx.passes.analysis.held_values import HeldValues, cast_once
from autocastfx.passes.analysis.ports import Ports
from autocastfx.passes.analysis.units import Units, units_of
from autocastfx.passes.analysis.value_ranges import Limit, reach
from autocastfx.passes.analysis.whole_numbers import WholeNumbers
from autocastfx.passes.classify import Classifier
from autocastfx.passes.drop_loss_casts import drop_loss_casts
from autocastfx.passes.insert_casts import Rewriter
from autocastfx.passes.make_conditional import soften
from autocastfx.passes.merge_repeated import merge_repeated
from autocastfx.passes.patterns.patterns import LOSS_CAST, MATH_ATTENTION, PATTERNS, REPEATED, SHORT_ATTENTION, chosen
from autocastfx.passes.place import place
from autocastfx.passes.place_simply import place_simply
from autocastfx.passes.recompose import recompose
from autocastfx.passes.record_plan import planned_casts, planned_copies, planned_node
from autocastfx.passes.replace_attention import PARTS, recompute_attention, write_out_attention
from autocastfx.passes.state import State
from autocastfx.passes.store_weights import LowReads, lower_views, read_copies, store_low
from autocastfx.passes.torch_autocast.dispatch import Dispatch
from autocastfx.passes.torch_autocast.expand import expand
from autocastfx.passes.torch_autocast.follow import follow
from autocastfx.passes.torch_autocast.insert_casts import recast
from autocastfx.passes.verify import verify
from autocastfx.plan.edited_plan import EditedPlan
from autocastfx.plan.plan import Decision, Placement, Plan, PlannedCast, PlannedNode, Recomposed, Traffic
from autocastfx.plan.ranges import Key, Ranges, key_of, mode_of
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import Matcher
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category
from autocastfx.runtime.variant import Variant

__all__ = ["FOLLOW_PIPELINE", "LOW", "PIPELINE", "Converter", "State"]

LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Converter:
    """One conversion's policy, applicable to any number of captured graphs. Pickles."""

    op_list: OpList
    facts: KernelFacts
    low: torch.dtype
    keep_output_dtype: bool = True
    fold: str = "exact"
    ranges: Ranges | None = None
    headroom: float = 2.0
    plan: EditedPlan | None = None
    recompose: tuple[str, ...] = chosen(True)  # names of patterns
    weights: str = "cast"

    def ports(self, device: torch.device) -> Ports:
        """Which inputs of a low node are not cast, on ``device``."""
        return Ports(self.op_list, self.facts, device.type)

    def dispatch(self, graph: fx.Graph) -> Dispatch:
        """How torch.autocast dispatches the ops of ``graph``, on the device that it was captured on."""
        inputs = (t for n in graph.nodes if n.op in ("placeholder", "get_attr") for t in tensors(n) if t.ndim)
        return Dispatch(self.op_list, self.low, next((t.device.type for t in inputs), "cpu"))

    def __call__(self, captured: Captured, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Variant:
        """A variant made from ``captured``, for ``device``.

        Args:
            captured: stays as it is.
            tensors: parameters and buffers by name.
            device: where the graph will run.

        Raises:
            BannedOpError: the list bans an op.
            PlanError: the plan given asks for what cannot be.
            VerifyError: the rewritten graph is not what was planned.
        """
        draft = captured.guesses is not None
        policy = replace(self, op_list=self.op_list.lenient()) if draft else self
        known = self.ranges.magnitudes(mode_of(captured.training)) if self.ranges is not None else {}
        graph, attributes, nodes, casts, traffic, recomposed = policy._convert(
            captured.graph, captured.attributes, tensors, device, known, "", captured.guesses
        )
        names = (LOW[self.low], device.type, self.op_list.name)
        copies = planned_copies(graph)
        plan = Plan(*names, tuple(nodes), tuple(casts), traffic, draft, tuple(recomposed), tuple(copies))
        inputs = [node for node in captured.graph.nodes if node.op == "placeholder"]
        return Variant(
            graph=graph,
            attributes=attributes,
            plan=plan,
            out_spec=captured.out_spec,
            structure=captured.structure,
            guard=shape_guard(inputs) if self.op_list.placement == "follow" else captured.guard,  # parts may pin sizes
            modes=captured.training,
            device=captured.device,
            state=captured.state,
            captured=captured,
        )

    def _convert(
        self,
        source: fx.Graph,
        attributes: Mapping[str, Any],
        held: Mapping[str, torch.Tensor],
        device: torch.device,
        known: Mapping[Key, Magnitude],
        prefix: str,
        guesses: frozenset[str] | None = None,
    ) -> tuple[fx.Graph, dict[str, Any], list[PlannedNode], list[PlannedCast], Traffic, list[Recomposed]]:
        follows = self.op_list.placement == "follow"
        graph = expand(source, self.dispatch(source)) if follows else copy_graph(source)
        inner = replace(self, keep_output_dtype=True)
        converted: dict[str, Any] = dict(attributes)
        nodes: list[PlannedNode] = []
        casts: list[PlannedCast] = []
        recomposed: list[Recomposed] = []
        traffic = Traffic()
        for node in graph.nodes:
            inner_graphs = subgraphs(node, attributes) if op_name(node) in CONVERTED_INSIDE else {}
            for target, module in inner_graphs.items():
                names = {**dict(module.named_children()), **dict(module.named_buffers())}
                inside = inner._convert(module.graph, names, {}, device, known, f"{prefix}{target}/")
                converted[target] = fx.GraphModule(inside[1], inside[0])
                nodes += inside[2]
                casts += inside[3]
                traffic += inside[4]
                recomposed += inside[5]
        state = State(
            graph=graph,
            attributes=converted,
            parameters=frozenset(n for n, t in held.items() if isinstance(t, nn.Parameter)),
            values=HeldValues.of({**held, **attributes}),
            dtypes={node: dtypes(node) for node in graph.nodes},
            ops={node: op_name(node) for node in graph.nodes},
            cached=cast_once(held),
            numbers={name: id(t) for name, t in held.items() if isinstance(t, nn.Parameter)},
            measured={node: known[key] for node in graph.nodes if (key := key_of(node, prefix)) in known},
            prefix=prefix,
            guesses=guesses,
        )
        for run in FOLLOW_PIPELINE if follows else PIPELINE:
            state = run(self, state, device)
        computing = [node for node in state.dtypes if node.op in ("call_function", "call_method", "call_module")]
        nodes += [planned_node(node, state, self.low, prefix) for node in computing]
        casts += planned_casts(graph, prefix)
        recomposed += [_prefixed(r, prefix) for r in state.recomposed]
        return graph, converted, nodes, casts, traffic + state.traffic, recomposed


def _recompose(converter: Converter, state: State, device: torch.device) -> State:
    rule = converter.op_list.rule
    wanted = [p for p in PATTERNS if p.name in converter.recompose]
    wanted = [p for p in wanted if converter.low == torch.bfloat16 or not p.needs_range]
    banned = [p for p in wanted if (found := rule(p.op)) is not None and found.category is Category.BAN]

    def ruled(node: fx.Node) -> list[str]:
        return [kind for kind in module_classes(node) if rule(kind) is not None]

    matcher = Matcher(converter.op_list, device.type)

    def category(node: fx.Node) -> Category | None:
        return found.category if (found := matcher(node)) is not None else None

    recomposed = recompose(state.graph, [p for p in wanted if p not in banned], ruled)
    for name, run in ((MATH_ATTENTION, write_out_attention), (SHORT_ATTENTION, recompute_attention)):
        if name in converter.recompose and _rounds_attention(converter, state, device):
            recomposed += run(state.graph, category)
    reached = {node.name: found for node, found in state.measured.items()}
    reached.update({r.node: reached[r.replaced[-1]] for r in recomposed if r.replaced[-1] in reached})
    if REPEATED in converter.recompose:
        recomposed = merge_repeated(state.graph, matcher, recomposed)
    if LOSS_CAST in converter.recompose:
        recomposed += drop_loss_casts(state.graph, category)
    measured = {node: reached[node.name] for node in state.graph.nodes if node.name in reached}
    now = {node: dtypes(node) for node in state.graph.nodes}
    ops = {node: op_name(node) for node in state.graph.nodes}
    return replace(state, recomposed=recomposed, measured=measured, dtypes=now, ops=ops)


def _rounds_attention(converter: Converter, state: State, device: torch.device) -> bool:
    """Whether the parts of attention on a CPU may give 16 bits each (but float16 does not hold all scores)."""
    is_kernel = converter.fold == "kernel" and converter.low == torch.bfloat16
    if not is_kernel or device.type != "cpu" or state.guesses is not None:
        return False
    rules = {op: converter.op_list.rule(op, device.type) for op in PARTS}
    categories = {op: converter.op_list.unlisted if rule is None else rule.category for op, rule in rules.items()}
    return categories["matmul"] is Category.ALLOW and not {Category.BAN, Category.KEEP} & {*categories.values()}


def _classify(converter: Converter, state: State, device: torch.device) -> State:
    calibrated = converter.ranges is not None
    limit = Limit(converter.low, converter.headroom if calibrated else 1.0)
    held = {n: v for n, v in state.values.magnitudes.items() if calibrated or n in state.parameters}
    reached = reach(state.graph, state.measured, held, converter.op_list, limit)
    measured = {node: found.largest for node, found in state.measured.items()}
    rules, facts, values = converter.op_list, converter.facts, state.values
    size, most = (example, largest_size) if state.guesses is None else (unknown_size, unknown_size)
    allowed = {n: (r := rules.rule(op_name(n))) is not None and r.category is Category.ALLOW for n in state.graph.nodes}
    classifier = Classifier(
        *(rules, facts, converter.low, device.type, reached.unfit),
        WholeNumbers.of(state.graph, values.whole, values.masks, measured, rules, facts, converter.low, most),
        distance_products(state.graph, allowed, rules, facts, size),
        {n: number for n, number in values.largest.items() if n in values.single},
        size,
    )
    found = classifier(state.graph, values.largest)
    if rules.placement == "follow":  # torch.autocast demands nothing
        return replace(state, classification=replace(found, wide=found.wide | reached.wide))
    decisions = Demands(converter.ports(device), state.parameters)(state.graph, found.decisions)
    return replace(state, classification=replace(found, decisions=decisions, wide=found.wide | reached.wide))


def _place(converter: Converter, state: State, device: torch.device) -> State:
    found = state.classification
    units = units_of(state.graph, found.decisions, converter.ports(device))
    simple = _with_views(converter, state, device, found.decisions, place_simply(found.decisions, units))
    placements = simple if converter.op_list.placement == "simple" else _cut(converter, state, units, device)
    if converter.plan is not None:
        obeyed = converter.plan.obey(found.decisions, placements, found.unable, state.prefix)
        state = replace(state, classification=replace(found, decisions=obeyed.pinned))
        units = units_of(state.graph, obeyed.pinned, converter.ports(device))
        decisions, placements = obeyed.result(_cut(converter, state, units, device))
        state = replace(state, classification=replace(found, decisions=decisions))

    def moved(placements: Mapping[fx.Node, Placement]) -> int:
        weights = _uncast(converter, state, device, placements)
        return bytes_moved(
            state.graph, placements, units, keep_output_dtype=converter.keep_output_dtype, weights=weights
        )

    return replace(state, placements=placements, traffic=Traffic(moved(placements), moved(simple)))


def _cut(converter: Converter, state: State, units: Units, device: torch.device) -> dict[fx.Node, Placement]:
    decisions = state.classification.decisions
    folding = Folding(converter.ports(device), converter.fold, LOW[converter.low])
    folds = folding(state.graph, decisions, state.classification.wide)
    placed = place(
        *(state.graph, decisions, units),
        folds=folds,
        keep_output_dtype=converter.keep_output_dtype,
        parameters=state.parameters,
        rounds=converter.fold == "kernel",
        sizes_known=state.guesses is None,
    )
    return _with_views(converter, state, device, decisions, placed)


def _with_views(
    converter: Converter,
    state: State,
    device: torch.device,
    decisions: Mapping[fx.Node, Decision],
    placed: dict[fx.Node, Placement],
) -> dict[fx.Node, Placement]:
    if converter.weights == "cast":
        return placed
    return lower_views(state.graph, decisions, placed, state.parameters, converter.ports(device))


def _uncast(
    converter: Converter, state: State, device: torch.device, placements: Mapping[fx.Node, Placement]
) -> frozenset[fx.Node]:
    """The parameters that are read low without a cast in each call."""
    found = [n for n in state.graph.nodes if n.op == "get_attr" and n.target in state.parameters]
    found = [n for n in found if n not in state.classification.wide]  # their casts saturate
    if converter.weights == "low":
        reads = LowReads(placements, converter.ports(device))
        mixed = {state.numbers[str(n.target)] for n in found if not reads.all_of(n)}
        found = [n for n in found if state.numbers[str(n.target)] not in mixed]
    return frozenset(found if converter.weights != "cast" else ())


def _rewrite(converter: Converter, state: State, device: torch.device) -> State:
    rewriter = Rewriter(
        converter.low, converter.ports(device), converter.keep_output_dtype, rounds=converter.fold == "kernel"
    )
    found = state.classification
    rewriter(state.graph, state.placements, found.wide, state.parameters, found.fills)
    return state


def _store_weights(converter: Converter, state: State, device: torch.device) -> State:
    if converter.weights == "cached":
        read_copies(state.graph, state.parameters, state.placements)
    elif converter.weights == "low":
        store_low(state.graph, state.numbers, converter.low)
    return state


def _verify(converter: Converter, state: State, device: torch.device) -> State:
    if state.guesses is not None:  # made without inputs: there is nothing to verify with
        soften(state.graph, state.placements, state.guesses, converter.low)
        return state
    verify(
        state.graph,
        state.placements,
        state.dtypes,
        low=converter.low,
        ports=converter.ports(device),
        keep_output_dtype=converter.keep_output_dtype,
        attributes=state.attributes,
        followed=state.followed,
    )
    return state


def _follow(converter: Converter, state: State, device: torch.device) -> State:
    followed = follow(state.graph, state.classification.decisions, converter.dispatch(state.graph))
    return replace(state, followed=followed, placements=followed.placements)


def _recast(converter: Converter, state: State, device: torch.device) -> State:
    if state.followed is not None:
        keeps = converter.keep_output_dtype
        recast(state.graph, state.followed, state.dtypes, cached=state.cached, keep_output_dtype=keeps)
    return state


Step = Callable[[Converter, State, torch.device], State]
PIPELINE: tuple[Step, ...] = (_recompose, _classify, _place, _rewrite, _store_weights, _verify)
# For a list with ``placement: follow``, on a graph whose composites are expanded: torch.autocast recomposes nothing.
FOLLOW_PIPELINE: tuple[Step, ...] = (_classify, _follow, _recast, _store_weights, _verify)


def _prefixed(found: Recomposed, prefix: str) -> Recomposed:
    return Recomposed(found.pattern, prefix + found.node, tuple(prefix + name for name in found.replaced))
