"""Which nodes of a 16-bit model are raised to float32, and where their float32 values flow on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.capture.progress import quiet_logs
from autocastfx.dtypes import dtype_name
from autocastfx.graph.alias import is_view_or_copy
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import argument, dtypes, is_member, uses, value
from autocastfx.graph.sizes import abstract_call, concrete_sizes, dtypes_of, in_dtype_of
from autocastfx.passes.decide.checks import CASTS, DTYPE, decision_by_list, refuse_banned
from autocastfx.plan import plan
from autocastfx.plan.plan import Cause, Decision, Forced, Placement, Precision, Why
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import Matcher
from autocastfx.policy.rule import Category, Rule, Runs

_WIDE = (torch.float32, torch.float64)
_COMPUTES = ("call_function", "call_method", "call_module")
STAYS_LOW = Forced(
    "forced:stays-low", "what it does has no float32 form here: change the model's code, or convert the float32 model"
)


@dataclass(frozen=True)
class Widener:
    """Chooses the nodes to raise in the graphs of one conversion.

    Attributes:
        matcher: gives the rule of a node.
        facts: ops that stand for others.
        low: the 16-bit dtype of the model.
        keep_output_dtype: the graph's outputs return to 16 bits.
    """

    matcher: Matcher
    facts: KernelFacts
    low: torch.dtype
    keep_output_dtype: bool = True

    def decide(self, graph: fx.Graph, fixed: Set[fx.Node]) -> dict[fx.Node, Decision]:
        """Decide each computing node: those that are ``deny`` are raised.

        Args:
            graph: captured, with abstract values.
            fixed: values whose memory is written into, which stay as captured.

        Raises:
            BannedOpError: the list bans an op of the graph.
        """
        decisions = {node: self._decide(node, fixed) for node in graph.nodes if node.op in _COMPUTES}
        return self.settle(graph, decisions)

    def settle(self, graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> dict[fx.Node, Decision]:
        """Return ``decisions`` with ``keep`` in place of ``deny`` for the nodes of ``graph`` that cannot be raised."""
        new_decisions, in_float32 = dict(decisions), _InFloat32(self.low, graph)
        for node, decision in decisions.items():
            if decision.category.is_float32 and (why := in_float32.refusal(node)) is not None:
                new_decisions[node] = Decision(Category.KEEP, why, STAYS_LOW)
        return new_decisions

    def _decide(self, node: fx.Node, fixed: Set[fx.Node]) -> Decision:
        if isinstance(node.target, HigherOrderOperator):
            return Decision(Category.KEEP, "values cross the border of a sub-graph as captured", plan.SUB_GRAPH)
        rule = self.matcher(node)
        listed = decision_by_list(self.matcher.op_list, rule)
        refuse_banned(node, listed)
        if not any(self.low in dtypes(one) for one in (node, *node.all_input_nodes)):
            return Decision(Category.KEEP, f"no {dtype_name(self.low)} value", plan.NOT_FLOAT32)
        is_cast = op_name(node) in CASTS
        of_module = rule is not None and bool(rule.path)
        if is_cast and not (of_module and set(dtypes(node)) == {self.low}):
            return Decision(Category.KEEP, "the model's own cast", plan.USER_CAST)
        if rule is not None and not of_module and rule.shipped and (other := self.facts.stands_for(node)) is not None:
            square = self.matcher.op_list.rule(other, self.matcher.device)
            listed = listed if square is None else decision_by_list(self.matcher.op_list, square)
        if not is_cast and (named := argument(node, "dtype")) is not None:
            return Decision(Category.KEEP, f"the call names dtype={str(named).removeprefix('torch.')}", DTYPE)
        if not listed.category.is_float32:
            return listed
        if rule is not None and of_module and not is_cast and self._is_exact(node, rule):
            return decision_by_list(self.matcher.op_list, self.matcher.own(node))
        if node in fixed or (is_cast and any(read in fixed for read in node.all_input_nodes)):
            return Decision(Category.KEEP, "shares memory that is written into", STAYS_LOW)
        return listed

    def _is_exact(self, node: fx.Node, rule: Rule[Runs]) -> bool:
        """True for an op that a rule for its whole module need not raise: what it gives is exact in 16 bits.

        It only moves values, or the list keeps it: rows of a table are widened when they are picked, not the table.
        """
        own = self.matcher.own(node)
        is_kept = own is not None and own.category is Category.KEEP
        return is_member(node) or (not rule.ops and (is_kept or is_view_or_copy(node)))

    def place(self, decisions: Mapping[fx.Node, Decision], fixed: Set[fx.Node]) -> dict[fx.Node, Placement]:
        """Place each computing node. A float32 value flows on through ops that lead to nothing but float32.

        Args:
            decisions: of all computing nodes of a graph; ``deny`` is raised.
            fixed: as in :meth:`decide`.
        """
        return _Flow(self, decisions, fixed).placements()


@dataclass(frozen=True)
class _Flow:
    """Where the float32 values of raised nodes flow."""

    widener: Widener
    decisions: Mapping[fx.Node, Decision]
    fixed: Set[fx.Node]

    def placements(self) -> dict[fx.Node, Placement]:
        raised = {node for node, decision in self.decisions.items() if decision.category.is_float32}
        sources: dict[fx.Node, fx.Node] = {}  # of each node that float32 values flow through, one that it reads
        for node in self.decisions:
            read = next((r for r in node.all_input_nodes if r in raised or r in sources), None)
            if read is not None and node not in raised and (is_member(node) or self._carries(node)):
                sources[node] = read
        while ends := [node for node in sources if not self._goes_on(node, raised, sources)]:
            for node in ends:
                del sources[node]
        wide = raised | sources.keys()
        return {node: self._placement(node, wide, sources.get(node)) for node in self.decisions}

    def _carries(self, node: fx.Node) -> bool:
        """True for an op that gives float32 of float32, and may."""
        decision = self.decisions[node]
        may = decision.category.is_free and node not in self.fixed
        return may and self.widener.low in dtypes(node) and op_name(node) not in CASTS

    def _goes_on(self, node: fx.Node, raised: Set[fx.Node], sources: Mapping[fx.Node, fx.Node]) -> bool:
        """True if all that ``node`` reads in 16 bits is float32 now, and all that reads it takes float32."""
        if any(self.widener.low in dtypes(r) and r not in raised and r not in sources for r in node.all_input_nodes):
            return False
        if is_member(node) and (node.all_input_nodes[0] in raised or self.widener.low not in dtypes(node)):
            return True  # the op gives its results so, whoever reads them
        return all(u in raised or u in sources or self._takes_any(u) for u in node.users)

    def _takes_any(self, node: fx.Node) -> bool:
        """True if ``node`` gives the same dtype, and nothing less exact, whatever the precision of its operand is."""
        decision = self.decisions.get(node)
        if decision is None:
            return node.op == "output" and not self.widener.keep_output_dtype
        if isinstance(value(node), (int, torch.SymInt)):  # it reads a size
            return True
        if argument(node, "other") is not None:  # a type_as that has nothing to do gives no copy, and no schema says so
            return False
        names = base_name(op_name(node)) in self.widener.facts.takes_dtype and argument(node, "dtype") in _WIDE
        casts = decision.source == plan.USER_CAST and set(dtypes(node)) <= {*_WIDE}
        return names or casts

    def _placement(self, node: fx.Node, wide: Set[fx.Node], source: fx.Node | None) -> Placement:
        decision = self.decisions[node]
        if source is not None:
            return Placement(Precision.FLOAT32, Precision.FLOAT32, Cause(Why.AFTER, (source.name,)))
        if node in wide:
            return Placement(Precision.FLOAT32, Precision.FLOAT32, Cause(Why.DENY))
        if decision.source == plan.SUB_GRAPH:
            return Placement(Precision.CAPTURED, Precision.CAPTURED, Cause(Why.CROSSES_BORDER))
        if decision.source == plan.NOT_FLOAT32:
            return Placement(Precision.CAPTURED, Precision.CAPTURED, Cause(Why.NO_FLOAT32))
        given = {use.argument for use in uses(node) if use.node in wide} if self._takes_any(node) else set[str]()
        floating = {d for n in (node, *node.all_input_nodes) for d in dtypes(n) if d.is_floating_point}
        run = Precision.LOW if floating == {self.widener.low} else Precision.CAPTURED
        return Placement(run, run, Cause(Why.AS_CAPTURED), tuple(sorted(given)))


class _InFloat32:
    """Runs nodes of a graph on abstract values that are float32 instead of 16-bit."""

    def __init__(self, low: torch.dtype, graph: fx.Graph) -> None:
        self.low, self.concrete = low, concrete_sizes(graph)

    def refusal(self, node: fx.Node) -> str | None:
        """Why ``node`` cannot be raised; None if it can."""
        if not isinstance(value(node), torch.Tensor) and not all(is_member(user) for user in node.users):
            return "its results are read together"
        if op_name(node) in CASTS:
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda read: self._raised(value(read)))
        target = node.target if callable(node.target) else getattr(torch.Tensor, str(node.target))
        try:
            with quiet_logs():
                given = dtypes_of(abstract_call(target, args, kwargs))
        except Exception as error:  # whatever a kernel raises on dtypes that it does not take
            first = str(error).partition("\n")[0]
            return f"it does not take float32: {first}"
        if given != tuple(torch.float32 if dtype == self.low else dtype for dtype in dtypes(node)):
            return f"gives {', '.join(map(dtype_name, given)) or 'nothing'} for float32 operands"
        return None

    def _raised(self, abstract: object) -> Any:
        return pytree.tree_map(self._leaf, self.concrete(abstract))

    def _leaf(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != self.low:
            return leaf
        return in_dtype_of(leaf, torch.empty(0, dtype=torch.float32, device="meta"))
