"""The checks that decide a node, in the order of ``CHECKS``, each with the reason that it gives.

A new reason is a ``Forced``, a function that looks for it, and its ``Check`` among the others. Plans, explanations and
pages say what stands here; the table of reasons in ``docs/placement.md`` begins with the functions' docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autocastfx.dtypes import dtype_name
from autocastfx.errors import BannedOpError
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
    module_path,
    settled_size,
    tensors,
    uses,
)
from autocastfx.graph.sizes import Size, abstract_call, product
from autocastfx.passes.analysis.backward_adds import contributions
from autocastfx.passes.analysis.exact_numbers import WholeNumbers, distance_products, told_apart
from autocastfx.passes.analysis.units import only_moves
from autocastfx.passes.analysis.value_ranges import Fill, Limit, fills, largest_mask, reach, reading_call_inputs
from autocastfx.passes.decide.demands import Demands, cancellations, offsets
from autocastfx.passes.state import Classification, Pass, State
from autocastfx.plan import plan
from autocastfx.plan.plan import EPSILON, NO_SOURCE, UNLISTED, Decision, Forced, forced_by_numbers
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import Matcher
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category, Rule, Runs

CASTS = ("to", "_to_copy", "type_as")
_INTEGERS = {torch.int16, torch.int32, torch.int64}  # 16 bits hold all smaller ones


@dataclass(frozen=True)
class Check:
    """One step of a decision."""

    look: Callable[[Case], Decision | str | None] = lambda case: case.listed  # how, or why, a case is decided here
    forces: Forced | None = None  # the reason; None where a list gives it
    category: Category = Category.DENY  # that it forces
    when: Callable[[Case], bool] = lambda case: True  # whether it is asked, by what the list says
    binds: bool = False  # so it is whoever asks for 16 bits, and also where the check is not asked
    goes_on: bool = False  # what it gives is no end, but what the list says to the checks that follow

    def __call__(self, case: Case) -> Decision | None:
        """The decision on ``case``, if it is made here."""
        why = self.look(case)
        return Decision(self.category, why, self.forces or NO_SOURCE) if isinstance(why, str) else why


@dataclass(frozen=True)
class Case:
    """A node to decide, and what can be looked for there."""

    known: Classifier
    node: fx.Node
    rule: Rule[Runs] | None  # the list's
    listed: Decision  # by the rule, as checks before have changed it
    wide: Set[fx.Node]  # values beyond the low dtype's range
    hidden: Set[fx.Node]  # those of them that are wide for nothing but fills
    fitting: Mapping[fx.Node, Fill]  # nodes that may run low with another number

    @property
    def _name(self) -> str:
        return base_name(op_name(self.node))

    @property
    def _low_name(self) -> str:
        return dtype_name(self.known.low)

    def is_cast(self) -> bool:
        """True for a cast, of the model as of capture."""
        return op_name(self.node) in CASTS

    def is_low_by_itself(self) -> bool:
        """True if the list asks for 16 bits, and not for all of a module, by which a person means whatever is there."""
        return self.listed.category.is_low and not (self.rule is not None and self.rule.path)

    def takes_numbers(self) -> bool:
        """True if numbers decide: of a free op, and of one that a person wants low who saw no number."""
        return self.listed.category.is_free or (self.rule is not None and self.rule.wanted == "low")

    def is_border(self) -> str | None:
        """Its values cross the border of a sub-graph."""
        is_border = isinstance(self.node.target, HigherOrderOperator)
        return "values cross the border of a sub-graph as captured" if is_border else None

    def refuses_casts(self) -> str | None:
        """It reads a tensor whose class takes no other dtype, as some that hold quantised weights."""
        for read in uses(self.node):
            abstract = next(iter(tensors(read.node)), None)
            if is_traceable_wrapper_subclass(abstract) and is_float32(read.node):
                try:
                    abstract_call(torch.Tensor.to, (abstract, self.known.low), {})
                except Exception:  # whatever the class raises
                    return f"{read.node.name} is a {type(abstract).__name__}, which takes no other dtype"
        return None

    def has_no_float32(self) -> str | None:
        """It reads no float32 value."""
        if any(has_float32(u.node) for u in uses(self.node)):
            return None
        return "makes float32 values from none" if has_float32(self.node) else "no float32 value"

    def changes_dtype(self) -> str | None:
        """It is a cast of the model that changes the dtype."""
        # Casts that follow the dtype of another value never get here: capture takes them out.
        if not self.is_cast() or (is_float32(self.node) and set(dtypes(uses(self.node)[0].node)) == {torch.float32}):
            return None
        return "the model's own cast"

    def opens_island(self) -> str | None:
        """It is a cast of the model to float32, with which a float32 island begins."""
        opens = op_name(self.node) in CASTS[:2] and argument(self.node, "dtype") == torch.float32
        return "the model's own cast to float32" if opens else None

    def is_island(self) -> str | None:
        """It is a product of which the model casts every operand to float32."""
        is_cast = [self._is_cast_by_model(u.node) for u in uses(self.node) if has_float32(u.node)]
        return "the model casts all its operands to float32" if is_cast and all(is_cast) else None

    def _is_cast_by_model(self, value: fx.Node) -> bool:
        while op_name(value) not in CASTS and only_moves(value, self.known.op_list) and len(value.all_input_nodes) == 1:
            value = value.all_input_nodes[0]
        return op_name(value) in CASTS[:2] and argument(value, "dtype") == torch.float32

    def names_dtype(self) -> str | None:
        """The call names a dtype."""
        named = argument(self.node, "dtype")
        if named is None or (named != torch.float32 and self._name not in self.known.facts.takes_dtype):
            return None
        return f"the call names dtype={str(named).removeprefix('torch.')}"

    def has_no_kernel(self) -> str | None:
        """The device has no 16-bit kernel."""
        runs = self.known.facts.runs(op_name(self.node), self._low_name, self.known.device)
        return None if runs else f"{self.known.device} has no {self._low_name} kernel"

    def does_not_fit(self) -> str | None:
        """A weight, or a value that was measured, is too large for the dtype."""
        return self.known.unfit.get(self.node)

    def is_deep(self) -> Decision | None:
        """It reduces more elements into one than the list lets 16 bits reduce."""
        kind = self.known.facts.reduces.get(self._name)
        limit = self.known.op_list.depth_limit(op_name(self.node), of_group=kind == "elements")
        if limit is None or limit.most is None or (depth := self._most(kind or "elements", limit.most)) is None:
            return None
        reason = f"reduces {depth} elements, more than reduction_depth {limit.most}"
        return Decision(Category.DENY, reason, limit.source or NO_SOURCE)

    def adds_in_16_bits(self) -> Decision | None:
        """Its kernel adds up more numbers in 16 bits than the list lets it, forwards or backwards."""
        limit, facts = self.known.op_list.backward_depth, self.known.facts
        if limit is None or limit.most is None:
            return None
        for way, kind in (("forward", facts.reduces.get(self._name)), ("backward", None)):
            adds = self._name in facts.adds_in_16_bits.get((self.known.device, way), frozenset())
            if adds and (most := self._most(kind, limit.most)) is not None:
                what = f"{'gradients' if way == 'backward' else 'numbers'} in {self._low_name}"
                many = f"any number of {what}" if math.isinf(most) else f"up to {most:,} {what}"
                reason = f"its kernel sums {many}, more than backward_depth {limit.most}"
                return Decision(Category.DENY, reason, limit.source or NO_SOURCE)
        return None

    def _most(self, kind: str | None, limit: int) -> Any:
        """How many elements its reduction of a ``kind``, else what moves them, makes one of; None if never > ``limit``.

        If there may be more in another call, the graph is for calls without: a decision for many holds for fewer, too.
        """

        def count(size: Size) -> Any:
            if kind is None:
                return contributions(self.node, self.known.facts.contributions[self._name], size)
            return None if (sizes := product(self.node, kind, size)) is None else sizes.depth

        most, settled = count(example), None
        if most is not None and most <= limit:
            settled = count(settled_size)
        return None if settled is not None and bool(settled <= limit) else most

    def is_square(self) -> Decision | None:
        """It is another op for its two operands are equal: ``x * x`` is a square, and has its rule."""
        other = self.known.facts.stands_for(self.node)
        return None if other is None else self._as_op(other, f"a {self._name} of a value with itself is a {other}")

    def is_small_product(self) -> Decision | None:
        """A contraction of few elements is elementwise work, and one to a single number is a sum."""
        limit, kind = self.known.op_list.product_depth, self.known.facts.reduces.get(self._name)
        if limit is None or limit.most is None or kind is None or (sizes := product(self.node, kind)) is None:
            return None
        if sizes.is_sum:
            return self._as_op("sum", f"adds up {sizes.depth} elements into one number, as a sum does")
        if self._most(kind, limit.most - 1) is not None:
            return None
        reason = f"adds up {sizes.depth} elements, fewer than product_depth {limit.most}: elementwise work"
        return Decision(Category.INFER, reason, limit.source or NO_SOURCE)

    def _as_op(self, other: str, because: str) -> Decision | None:
        """The decision of the op ``other``, if the list has a rule for it."""
        if (rule := self.known.op_list.rule(other, self.known.device)) is None:
            return None
        decision = decision_by_list(self.known.op_list, rule)
        return replace(decision, reason=f"{because}; {rule.reason}" if rule.reason else because)

    def has_whole_operand(self) -> str | None:
        """It is a product that reads or gives whole numbers which 16 bits do not tell apart."""
        node, whole, most = self.node, self.known.whole, told_apart(self.known.low)
        masks = [u.node for u in uses(node) if takes_mask(node, u)]
        reads = [u.node for u in uses(node) if u.node not in masks]
        for value in (n for n in (*reads, node) if has_float32(n) and whole.reach.get(n, 0.0) > most):
            return self._blurred("gives" if value is node else f"reads {value.name}:", value)
        positions = (n for n in masks if has_float32(n) and whole.are_positions(n, most))
        return next((f"adds positions: {mask.name}" for mask in positions), None)

    def meets_integers(self) -> str | None:
        """It reads such whole numbers as integers beside 16-bit values, to whose dtype torch rounds them."""
        facts, tags = self.known.facts, getattr(self.node.target, "tags", ())
        mixes = torch.Tag.pointwise in tags or self._name in {*facts.mixed_args, *facts.joins}
        for value in (u.node for u in uses(self.node) if mixes and not _INTEGERS.isdisjoint(dtypes(u.node))):
            # A single one widens nothing, unless it is added.
            counts = any(t.ndim for t in tensors(value)) or facts.whole_numbers.get(self._name) == "added"
            if counts and self.known.whole.reach.get(value, 0.0) > told_apart(self.known.low):
                return self._blurred(f"reads {value.name}:", value)
        return None

    def _blurred(self, what: str, value: fx.Node) -> str:
        reach, most = self.known.whole.reach[value], told_apart(self.known.low)
        upto = "of any size" if math.isinf(reach) else f"up to {reach:,.0f}"
        return f"{what} whole numbers {upto}; {self._low_name} tells them apart up to {most:,}"

    def cancels(self) -> str | None:
        """It is a product that is added to the squares of its own operands: a small difference of large values."""
        square = self.known.distances.get(self.node)
        why = "is taken from the squares of its own operands"
        return f"{why} ({square.name}): a small difference" if square is not None else None

    def has_large_number(self) -> str | None:
        """A number in the model's code is beyond the dtype's range."""
        return self._lost_number(CONSTANT)

    def has_small_number(self) -> str | None:
        """A number in the model's code would become 0, or 1 if it is near 1."""
        return self._lost_number(EPSILON)

    def _lost_number(self, reason: Forced) -> str | None:
        first = next(self._lost_numbers(), None) if self.node not in self.fitting else None
        return first[1] if first is not None and first[0] is reason else None

    def _lost_numbers(self) -> Iterator[tuple[Forced, str]]:
        low, known = torch.finfo(self.known.low), self.known
        rounds = not known.facts.keeps_numbers(op_name(self.node), known.device)
        read = (str(u.node.target) for u in uses(self.node) if u.node.op == "get_attr")
        scalars = ((target, known.numbers[target]) for target in read if target in known.numbers)
        for name, number in (*constants(self.node), *scalars):
            size = abs(number)
            if math.isfinite(size) and size > low.max:
                yield CONSTANT, f"{name}={number:g} is beyond {self._low_name}'s range"
            elif rounds and 0 < size < low.tiny:
                yield EPSILON, f"{name}={number:g} is below {self._low_name}'s smallest normal value"
            elif rounds and 0 < abs(size - 1) <= low.eps / 2 and torch.tensor(size, dtype=known.low, device="cpu") == 1:
                yield EPSILON, f"{name}={number:.9g} is rounded to {math.copysign(1, number):g} in {self._low_name}"

    def reads_wide(self) -> str | None:
        """It combines a value beyond the dtype's range with others."""
        # An op that only moves such a value saturates it, as a mask.
        category, kept = self.listed.category, self.known.op_list.kept(op_name(self.node))
        reads = [u for u in uses(self.node) if has_float32(u.node)]
        if category.is_low:
            reads = [u for u in reads if not takes_mask(self.node, u)]
        elif not category.is_free or len(reads) < 2:
            return None
        sources = [u.node for u in reads if u.node in self.wide and u.argument not in kept]
        if not sources or not has_float32(self.node) or (len(sources) == 1 and sources[0] in self.hidden):
            return None
        return f"{sources[0].name} holds values beyond {self._low_name}'s range"

    def fills(self) -> Decision | None:
        """A number that is any large one: if it runs low, it is half the largest, for a score may be added."""
        if (fill := self.fitting.get(self.node)) is None:
            return None
        number, listed = math.copysign(largest_mask(self.known.low), fill.number), self.listed
        words = f"{fill.argument}={fill.number:g}, which only hides scores, is {number:g} in {self._low_name}"
        return replace(listed, reason=f"{listed.reason}; {words}" if listed.reason else words)


TENSOR_CLASS = Forced(
    "forced:tensor-class", "its tensor cannot be cast: nothing but a weight of another class changes it"
)
DTYPE = Forced("forced:dtype", "the call names its dtype itself: remove that in the model")
NO_KERNEL = Forced("forced:no-kernel", "the device cannot run it in 16 bits: nothing but another device changes it")
RANGE = forced_by_numbers(
    "forced:range",
    "what was measured comes too near to the dtype's maximum: give convert a smaller headroom=, or use bfloat16",
)
WHOLE = forced_by_numbers(
    "forced:whole",
    "the numbers are too large for 16 bits to tell them apart: scale them in the model, or set run to low in an edited "
    "plan",
)
CONSTANT = forced_by_numbers("forced:constant", "the number stands in the model's code: use a smaller one there")

CHECKS = (
    Check(Case.is_border, plan.SUB_GRAPH, Category.KEEP, binds=True),
    Check(lambda case: refuse_banned(case.node, case.listed)),
    Check(Case.refuses_casts, TENSOR_CLASS, binds=True),
    # torch.autocast knows no further reasons, and casts 16-bit values too.
    Check(when=lambda case: case.known.op_list.placement == "follow"),
    Check(Case.has_no_float32, plan.NOT_FLOAT32, Category.KEEP, binds=True),
    Check(Case.changes_dtype, plan.USER_CAST, Category.KEEP, binds=True),
    Check(Case.opens_island, plan.USER_CAST, binds=True),
    Check(when=Case.is_cast),
    # A person who names the op means its squares, too.
    Check(Case.is_square, when=lambda case: bool(case.rule and not case.rule.path and case.rule.shipped), goes_on=True),
    Check(when=lambda case: case.listed.category.is_fixed),
    Check(Case.names_dtype, DTYPE, binds=True),
    Check(Case.has_no_kernel, NO_KERNEL, binds=True),
    Check(Case.does_not_fit, RANGE),
    Check(Case.is_deep),
    Check(Case.adds_in_16_bits, when=lambda case: case.rule is None or case.rule.shipped),
    Check(Case.is_island, plan.USER_CAST, when=Case.is_low_by_itself),
    Check(Case.has_whole_operand, WHOLE, when=lambda case: case.listed.category.is_low),
    Check(Case.cancels, plan.CANCELLATION, when=lambda case: case.listed.category.is_low),
    Check(Case.is_small_product, when=Case.is_low_by_itself, goes_on=True),
    Check(Case.meets_integers, WHOLE, when=lambda case: case.listed.category.is_free),
    Check(Case.has_large_number, CONSTANT, when=Case.takes_numbers, binds=True),
    Check(Case.has_small_number, EPSILON, when=Case.takes_numbers),
    Check(Case.reads_wide, plan.WIDE),
    Check(Case.fills),
)


@dataclass(frozen=True)
class Classifier:
    """Decides the nodes of a graph by what is known of it."""

    op_list: OpList  # categories by op name
    facts: KernelFacts  # what the device's kernels do
    low: torch.dtype  # torch.float16 or torch.bfloat16
    device: str  # type of the device that the graph will run on
    unfit: Mapping[fx.Node, str] = field(default_factory=dict)  # why the low dtype cannot hold the values of a node
    whole: WholeNumbers = field(default_factory=lambda: WholeNumbers({}, frozenset()))
    distances: Mapping[fx.Node, fx.Node] = field(default_factory=dict)  # products added to a square of an operand
    numbers: Mapping[str, float] = field(default_factory=dict)  # in tensors of one element, by ``get_attr`` target

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
        matcher, cases, decisions = Matcher(self.op_list, self.device), list[Case](), dict[fx.Node, Decision]()
        wide: set[fx.Node] = set()
        hidden: set[fx.Node] = set()  # values that are wide for nothing but fills
        limit = float(torch.finfo(self.low).max)
        for node in graph.nodes:
            if node.op == "get_attr" and largest.get(str(node.target), 0.0) > limit:
                wide.add(node)
            if node.op in ("call_function", "call_method", "call_module"):
                rule = matcher(node)
                cases.append(Case(self, node, rule, decision_by_list(self.op_list, rule), wide, hidden, fitting))
                decision = decisions[node] = _decide(cases[-1])
                passes_on = decision.category.is_free or decision.category is Category.KEEP
                reads = {u.node for u in uses(node)} & wide if passes_on else set[fx.Node]()
                made_wide = decision.source in (CONSTANT, plan.WIDE) or self._is_wide_constant(node)
                fills_in = node in fitting
                if made_wide or fills_in or reads:
                    wide.add(node)
                follows = passes_on or decision.category.is_low
                if (fills_in or reads) and follows and not made_wide and reads <= hidden:
                    hidden.add(node)
        unable = {case.node: why for case in cases if (why := _unable(case)) is not None}
        meets = {node for node, fill in fitting.items() if not hidden.issuperset(fill.reached & wide)}
        computed = fitting.keys() | {n for n, decision in decisions.items() if decision.category.is_low}
        meets |= reading_call_inputs(graph, fitting, computed)
        return Classification(decisions, frozenset(wide), unable, fitting), meets

    def _is_wide_constant(self, node: fx.Node) -> bool:
        """True if ``node`` makes a tensor of a number that the low dtype cannot hold (``full``, ``scalar_tensor``)."""
        largest = float(torch.finfo(self.low).max)
        made = has_float32(node) and not any(has_float32(u.node) for u in uses(node))
        return made and any(largest < abs(number) < math.inf for _, number in constants(node))


def _decide(case: Case) -> Decision:
    for check in CHECKS:
        decision = check(case) if check.when(case) else None
        if decision is not None and not check.goes_on:
            return decision
        case = case if decision is None else replace(case, listed=decision)
    return case.listed


def _unable(case: Case) -> str | None:
    """Why a node cannot run low whoever asks for it."""
    decisions = (check(case) for check in CHECKS if check.binds)
    return next((decision.reason for decision in decisions if decision is not None), None)


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


# The decision that an op list alone gives a node, and the error of an op that it bans.


def decision_by_list(op_list: OpList, rule: Rule[Runs] | None) -> Decision:
    """The decision of ``rule``; of an op without one, as the list says of unlisted ops."""
    if rule is None:
        return Decision(op_list.unlisted or Category.KEEP, "in no list", UNLISTED)
    return Decision(rule.category, rule.reason, rule.source or NO_SOURCE, rule)


def refuse_banned(node: fx.Node, decision: Decision) -> None:
    """Refuse a node that the list bans.

    Raises:
        BannedOpError: it does.
    """
    if decision.category is Category.BAN:
        raise BannedOpError(
            f"node {node.name!r} in module {module_path(node) or '(root)'!r} is {op_name(node)}, which "
            f"{decision.source} bans: {decision.reason or 'no reason given'}. Replace the op in the model, or list it "
            "in another category."
        )
