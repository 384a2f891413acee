"""graph and op list → a decision per node. Pure: no edge is touched, no other pass is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autocastfx.dtypes import dtype_name
from autocastfx.graph.magnitude import takes_mask
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import (
    argument,
    constants,
    dtypes,
    example,
    has_float32,
    is_float32,
    largest_size,
    settled_size,
    tensors,
    uses,
)
from autocastfx.graph.sizes import Size, abstract_call, product
from autocastfx.passes.analysis.backward_adds import contributions
from autocastfx.passes.analysis.demands import Demands, cancellations, offsets
from autocastfx.passes.analysis.exact_numbers import WholeNumbers, distance_products, forced_by_number, told_apart
from autocastfx.passes.analysis.units import only_moves
from autocastfx.passes.analysis.value_ranges import Fill, Limit, fills, largest_mask, reach, reading_call_inputs
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan.plan import NO_SOURCE, Decision, Forced, decision_by_list, refuse_banned
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import Matcher
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category

_CASTS = ("to", "_to_copy", "type_as")
_INTEGERS = {torch.int16, torch.int32, torch.int64}  # 16 bits hold all smaller ones


@dataclass(frozen=True)
class Classifier:
    """The settings of one conversion.

    Attributes:
        op_list: categories by op name.
        facts: what the device's kernels do.
        low: ``torch.float16`` or ``torch.bfloat16``.
        device: device type that the graph will run on.
        unfit: why the low dtype cannot hold a node's values, for those that it cannot.
        whole: the values that are whole numbers.
        distances: products that are added to squares of their own operands, each with such a square.
        numbers: constants and buffers of one element, by ``get_attr`` target.
    """

    op_list: OpList
    facts: KernelFacts
    low: torch.dtype
    device: str
    unfit: Mapping[fx.Node, str] = field(default_factory=dict)
    whole: WholeNumbers = field(default_factory=lambda: WholeNumbers({}, frozenset()))
    distances: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, graph: fx.Graph, largest: Mapping[str, float]) -> Classification:
        """Decide each computing node of ``graph``.

        Args:
            graph: captured, with abstract values.
            largest: largest finite magnitude of the constants and buffers, by ``get_attr`` target.

        Raises:
            BannedOpError: the list bans an op of the graph.
        """
        # In float16 no number is so large that it hides whatever score there may be, and all that is added to it.
        is_far = self.low == torch.bfloat16 and self.op_list.placement != "follow"
        fitting = fills(graph, largest_mask(self.low)) if is_far else {}
        while True:  # each time with fewer
            classification, meets = self._with_fills(graph, largest, fitting)
            if not meets:
                return classification
            fitting = {node: fill for node, fill in fitting.items() if node not in meets}

    def _with_fills(
        self, graph: fx.Graph, largest: Mapping[str, float], fitting: Mapping[fx.Node, Fill]
    ) -> tuple[Classification, set[fx.Node]]:
        """The decisions if ``fitting`` may run low, and those of them that may not, for they meet other wide values."""
        decisions: dict[fx.Node, Decision] = {}
        wide: set[fx.Node] = set()
        hidden: set[fx.Node] = set()  # values that are wide for nothing but fills
        limit = float(torch.finfo(self.low).max)
        for node in graph.nodes:
            if node.op == "get_attr" and largest.get(str(node.target), 0.0) > limit:
                wide.add(node)
            if node.op in ("call_function", "call_method", "call_module"):
                decision = decisions[node] = self._decide(node, wide, hidden, fitting)
                passes_on = decision.category.is_free or decision.category is Category.KEEP
                reads = {u.node for u in uses(node)} & wide if passes_on else set[fx.Node]()
                made_wide = decision.source in (Forced.CONSTANT, Forced.WIDE) or self._is_wide_constant(node)
                fills_in = node in fitting
                if made_wide or fills_in or reads:
                    wide.add(node)
                follows = passes_on or decision.category.is_low
                if (fills_in or reads) and follows and not made_wide and reads <= hidden:
                    hidden.add(node)
        unable = {node: why for node, decision in decisions.items() if (why := self._unable(node, decision, fitting))}
        meets = {node for node, fill in fitting.items() if not hidden.issuperset(fill.reached & wide)}
        computed = fitting.keys() | {n for n, decision in decisions.items() if decision.category.is_low}
        meets |= reading_call_inputs(graph, fitting, computed)
        return Classification(decisions, frozenset(wide), unable, fitting), meets

    def _unable(self, node: fx.Node, decision: Decision, fitting: Mapping[fx.Node, Fill]) -> str | None:
        if decision.source in (Forced.SUB_GRAPH, Forced.NOT_FLOAT32) or (
            decision.source == Forced.USER_CAST and op_name(node) in _CASTS
        ):
            return decision.reason
        forced = (
            self._refused_cast(node),
            self._explicit_dtype(node),
            self._no_kernel(node),
            None if node in fitting else self._number(node),
        )
        return next((d.reason for d in forced if d is not None and d.source != Forced.EPSILON), None)

    def _decide(
        self, node: fx.Node, wide: Set[fx.Node], hidden: Set[fx.Node], fitting: Mapping[fx.Node, Fill]
    ) -> Decision:
        if isinstance(node.target, HigherOrderOperator):
            return Decision(Category.KEEP, "values cross the border of a sub-graph as captured", Forced.SUB_GRAPH)
        rule = Matcher(self.op_list, self.device)(node)
        listed = decision_by_list(self.op_list, rule)
        refuse_banned(node, listed)
        if forced := self._refused_cast(node):
            return forced
        if self.op_list.placement == "follow":  # torch.autocast knows no forced rules, and casts 16-bit values too
            return listed
        reads = [u.node for u in uses(node) if has_float32(u.node)]
        if not reads and not has_float32(node):
            return Decision(Category.KEEP, "no float32 value", Forced.NOT_FLOAT32)
        if not reads:
            return Decision(Category.KEEP, "makes float32 values from none", Forced.NOT_FLOAT32)
        if op_name(node) in _CASTS:
            return self._user_cast(node, listed)
        if rule is not None and not rule.path and rule.shipped:  # a person who names the op means its squares, too
            listed = self._square(node, listed)
        if listed.category.is_fixed:
            return listed
        for check in (self._explicit_dtype, self._no_kernel, self._range, self._depth):
            if forced := check(node):
                return forced
        if (rule is None or rule.shipped) and (forced := self._adds(node)):
            return forced
        if listed.category.is_low:
            of_module = rule is not None and bool(rule.path)  # by which a person asks for it, whatever it is
            checks = [self._whole_operand, self._distance]
            for check in checks if of_module else [self._island, *checks]:
                if forced := check(node):
                    return forced
            if not of_module:
                listed = self._product(node, listed)
        if listed.category.is_free and (forced := self._meets_integers(node)):
            return forced
        if node in fitting:
            return self._wide(node, listed, wide, hidden) or self._filled(fitting[node], listed)
        asked_low = rule is not None and rule.wanted == "low"  # by a person who saw no number
        if (listed.category.is_free or asked_low) and (forced := self._number(node)):
            return forced
        return self._wide(node, listed, wide, hidden) or listed

    def _filled(self, fill: Fill, listed: Decision) -> Decision:
        """A number that is any large one: where the node runs low, it is half the largest, for a score may be added."""
        number = math.copysign(largest_mask(self.low), fill.number)
        words = f"{fill.argument}={fill.number:g}, which only hides scores, is {number:g} in {self._low_name}"
        return replace(listed, reason=f"{listed.reason}; {words}" if listed.reason else words)

    def _wide(self, node: fx.Node, listed: Decision, wide: Set[fx.Node], hidden: Set[fx.Node]) -> Decision | None:
        """An op that combines a value beyond the range with others; one that only moves it saturates it, as a mask."""
        kept = self.op_list.kept(op_name(node))
        reads = [u for u in uses(node) if has_float32(u.node)]
        if listed.category.is_low:
            reads = [u for u in reads if not takes_mask(node, u)]
        elif not listed.category.is_free or len(reads) < 2:
            return None
        sources = [u.node for u in reads if u.node in wide and u.argument not in kept]
        if not sources or not has_float32(node) or (len(sources) == 1 and sources[0] in hidden):
            return None
        reason = f"{sources[0].name} holds values beyond {self._low_name}'s range"
        return Decision(Category.DENY, reason, Forced.WIDE)

    def _is_wide_constant(self, node: fx.Node) -> bool:
        """True if ``node`` makes a tensor of a number that the low dtype cannot hold (``full``, ``scalar_tensor``)."""
        largest = float(torch.finfo(self.low).max)
        made = has_float32(node) and not any(has_float32(u.node) for u in uses(node))
        return made and any(largest < abs(number) < math.inf for _, number in constants(node))

    @property
    def _low_name(self) -> str:
        return dtype_name(self.low)

    def _user_cast(self, node: fx.Node, listed: Decision) -> Decision:
        """A captured cast: one that changes the dtype is the model's own; one that does not opens a float32 island.

        Casts that follow the dtype of another value never get here: capture takes them out.
        """
        if not is_float32(node) or set(dtypes(uses(node)[0].node)) != {torch.float32}:
            return Decision(Category.KEEP, "the model's own cast", Forced.USER_CAST)
        if op_name(node) == "type_as" or argument(node, "dtype") != torch.float32:
            return listed
        return Decision(Category.DENY, "the model's own cast to float32", Forced.USER_CAST)

    def _refused_cast(self, node: fx.Node) -> Decision | None:
        """A read of a tensor whose class takes no other dtype, as some that hold quantised weights."""
        for read in uses(node):
            abstract = next(iter(tensors(read.node)), None)
            if is_traceable_wrapper_subclass(abstract) and is_float32(read.node):
                try:
                    abstract_call(torch.Tensor.to, (abstract, self.low), {})
                except Exception:  # whatever the class raises
                    reason = f"{read.node.name} is a {type(abstract).__name__}, which takes no other dtype"
                    return Decision(Category.DENY, reason, Forced.TENSOR_CLASS)
        return None

    def _explicit_dtype(self, node: fx.Node) -> Decision | None:
        named = argument(node, "dtype")
        if named is None or (named != torch.float32 and base_name(op_name(node)) not in self.facts.takes_dtype):
            return None
        return Decision(Category.DENY, f"the call names dtype={str(named).removeprefix('torch.')}", Forced.DTYPE)

    def _no_kernel(self, node: fx.Node) -> Decision | None:
        if self.facts.runs(op_name(node), self._low_name, self.device):
            return None
        return Decision(Category.DENY, f"{self.device} has no {self._low_name} kernel", Forced.NO_KERNEL)

    def _range(self, node: fx.Node) -> Decision | None:
        why = self.unfit.get(node)
        return Decision(Category.DENY, why, Forced.RANGE) if why is not None else None

    def _depth(self, node: fx.Node) -> Decision | None:
        """More elements reduced into one than the list lets 16 bits reduce."""
        name = op_name(node)
        kind = self.facts.reduces.get(base_name(name))
        limit = self.op_list.depth_limit(name, of_group=kind == "elements")
        if limit is None or limit.most is None:
            return None
        depth = self._most(partial(self._elements, node, kind or "elements"), limit.most)
        if depth is None:
            return None
        reason = f"reduces {depth} elements, more than reduction_depth {limit.most}"
        return Decision(Category.DENY, reason, limit.source or NO_SOURCE)

    def _adds(self, node: fx.Node) -> Decision | None:
        """A kernel that adds up more numbers in 16 bits than the list lets it, forwards or backwards."""
        limit, name = self.op_list.backward_depth, base_name(op_name(node))
        if limit is None or limit.most is None:
            return None
        for way, kind in (("forward", self.facts.reduces.get(name)), ("backward", None)):
            if name not in self.facts.adds_in_16_bits.get((self.device, way), frozenset()):
                continue
            if (most := self._most(partial(self._meeting, node, kind), limit.most)) is not None:
                what = f"{'gradients' if way == 'backward' else 'numbers'} in {self._low_name}"
                many = f"any number of {what}" if math.isinf(most) else f"up to {most:,} {what}"
                reason = f"its kernel sums {many}, more than backward_depth {limit.most}"
                return Decision(Category.DENY, reason, limit.source or NO_SOURCE)
        return None

    def _meeting(self, node: fx.Node, kind: str | None, size: Size) -> Any:
        """How many numbers its kernel adds up into one: by its reduction of a ``kind``, else by what moves them."""
        if kind is not None:
            return self._elements(node, kind, size)
        return contributions(node, self.facts.contributions[base_name(op_name(node))], size)

    def _elements(self, node: fx.Node, kind: str, size: Size) -> Any:
        sizes = product(node, kind, size)
        return None if sizes is None else sizes.depth

    def _square(self, node: fx.Node, listed: Decision) -> Decision:
        """An op of two equal operands that is another op: ``x * x`` is a square, and has its rule."""
        other, name = self.facts.stands_for(node), base_name(op_name(node))
        return listed if other is None else self._as_op(other, f"a {name} of a value with itself is a {other}", listed)

    def _product(self, node: fx.Node, listed: Decision) -> Decision:
        """A contraction as its sizes say: one of few elements is elementwise work, one to a single number is a sum."""
        limit, kind = self.op_list.product_depth, self.facts.reduces.get(base_name(op_name(node)))
        sizes = product(node, kind, example) if limit is not None and kind is not None else None
        if sizes is None or kind is None or limit is None or limit.most is None:
            return listed
        if sizes.is_sum:
            return self._as_op("sum", f"adds up {sizes.depth} elements into one number, as a sum does", listed)
        if self._most(partial(self._elements, node, kind), limit.most - 1) is not None:
            return listed
        reason = f"adds up {sizes.depth} elements, fewer than product_depth {limit.most}: elementwise work"
        return Decision(Category.INFER, reason, limit.source or NO_SOURCE)

    def _most(self, count: Callable[[Size], Any], limit: int) -> Any:
        """The number that ``count`` gives for the example sizes, if it may be above ``limit`` in a call; else None.

        If it may be above in another call, the graph is for calls where it is not. A decision for many holds for fewer,
        too.
        """
        most = count(example)
        if most is None or (most <= limit and (settled := count(settled_size)) is not None and bool(settled <= limit)):
            return None
        return most

    def _as_op(self, other: str, because: str, listed: Decision) -> Decision:
        """The decision of the op ``other``, if the list has a rule for it."""
        rule = self.op_list.rule(other, self.device)
        if rule is None:
            return listed
        decision = decision_by_list(self.op_list, rule)
        return replace(decision, reason=f"{because}; {rule.reason}" if rule.reason else because)

    def _island(self, node: fx.Node) -> Decision | None:
        """A product of which the model casts every operand to float32 itself."""
        reads = [u.node for u in uses(node) if has_float32(u.node)]
        if not reads or not all(self._is_cast_by_model(read) for read in reads):
            return None
        return Decision(Category.DENY, "the model casts all its operands to float32", Forced.USER_CAST)

    def _is_cast_by_model(self, value: fx.Node) -> bool:
        while op_name(value) not in _CASTS and only_moves(value, self.op_list) and len(value.all_input_nodes) == 1:
            value = value.all_input_nodes[0]
        return op_name(value) in _CASTS[:2] and argument(value, "dtype") == torch.float32

    def _number(self, node: fx.Node) -> Decision | None:
        return forced_by_number(node, self.low, self.numbers, self.facts, self.device)

    def _whole_operand(self, node: fx.Node) -> Decision | None:
        """A product that reads or gives whole numbers which the low dtype does not tell apart."""
        most = told_apart(self.low)
        masks = [u.node for u in uses(node) if takes_mask(node, u)]
        reads = [u.node for u in uses(node) if u.node not in masks]
        for value in (n for n in (*reads, node) if has_float32(n) and self.whole.reach.get(n, 0.0) > most):
            return self._blurred("gives" if value is node else f"reads {value.name}:", value)
        for mask in (n for n in masks if has_float32(n) and self.whole.are_positions(n, most)):
            return Decision(Category.DENY, f"adds positions: {mask.name}", Forced.WHOLE)
        return None

    def _meets_integers(self, node: fx.Node) -> Decision | None:
        """An op beside whose 16-bit values torch rounds integers; a single one widens nothing, unless it is added."""
        name, facts = base_name(op_name(node)), self.facts
        mixes = torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in {*facts.mixed_args, *facts.joins}
        for value in (u.node for u in uses(node) if mixes and not _INTEGERS.isdisjoint(dtypes(u.node))):
            counts = any(t.ndim for t in tensors(value)) or facts.whole_numbers.get(name) == "added"
            if counts and self.whole.reach.get(value, 0.0) > told_apart(self.low):
                return self._blurred(f"reads {value.name}:", value)
        return None

    def _blurred(self, what: str, value: fx.Node) -> Decision:
        reach = self.whole.reach[value]
        upto = "of any size" if math.isinf(reach) else f"up to {reach:,.0f}"
        reason = f"{what} whole numbers {upto}; {self._low_name} tells them apart up to {told_apart(self.low):,}"
        return Decision(Category.DENY, reason, Forced.WHOLE)

    def _distance(self, node: fx.Node) -> Decision | None:
        if node not in self.distances:
            return None
        reason = f"is taken from the squares of its own operands ({self.distances[node].name}): a small difference"
        return Decision(Category.DENY, reason, Forced.DISTANCE)


class Classify(Pass):
    """Decides each node by the op lists, by what its values are known to be, and by the demands of later nodes."""

    name = "classify"
    rewrites = False

    def __call__(self, state: State) -> State:
        """The state with decisions.

        Raises:
            BannedOpError: the list bans an op.
        """
        settings, values = self.settings, state.values
        rules, facts, low = settings.op_list, settings.facts, settings.low
        calibrated = settings.ranges is not None
        limit = Limit(low, settings.headroom if calibrated else 1.0)
        magnitudes = {n: v for n, v in values.magnitudes.items() if calibrated or n in state.parameters}
        reached = reach(state.graph, state.measured, magnitudes, rules, limit)
        measured = {node: magnitude.largest for node, magnitude in state.measured.items()}
        ops = ((node, rules.rule(op_name(node))) for node in state.graph.nodes)
        allowed = {node: rule is not None and rule.category.is_low for node, rule in ops}
        classifier = Classifier(
            *(rules, facts, low, settings.device, reached.unfit),
            WholeNumbers.of(state.graph, values.whole, values.masks, measured, rules, facts, low, largest_size),
            distance_products(state.graph, allowed, rules, facts, example),
            {n: number for n, number in values.largest.items() if n in values.fixed_scalars},
        )
        classification = classifier(state.graph, values.largest)
        classification = replace(classification, wide=classification.wide | reached.wide)
        if rules.placement != "follow":  # torch.autocast demands nothing
            cancelling = cancellations(state.graph, values, rules, facts)
            held = values.magnitudes if settings.fold != "kernel" else {}  # which rounds what is added
            far = offsets(state.graph, state.parameters, held, state.measured)
            demands = Demands(settings.ports, state.parameters, cancelling, far)
            classification = replace(classification, decisions=demands(state.graph, classification.decisions))
        return replace(state, classification=classification)
