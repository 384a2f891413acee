"""Decide what is kept for backward: by an op list's rules, and the fewest bytes from which the rest is recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.graph.alias import is_opaque, reachable, storage_of
from autocastfx.graph.magnitude import takes_mask
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import draws_random_numbers, module_path, tensors, uses, value
from autocastfx.graph.sizes import concrete_sizes
from autocastfx.passes.analysis.min_cut import Term, cheapest
from autocastfx.passes.analysis.units import listed_category, only_moves
from autocastfx.passes.state import Classification
from autocastfx.plan.plan import CANCELLATION, Forced, PlannedSaved, SavedSize
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.match import Matcher
from autocastfx.policy.rule import Category
from autocastfx.policy.saved import Keep
from autocastfx.runtime.saved import FORMS, as_it_is, row_dim
from autocastfx.runtime.working_copies import quantized_copy, working_copy

_LEAST = 4096  # elements: a smaller value is not worth a call
_DEEPEST = 6  # ops that run again one after the other: a residual stream is else summed up anew at each of its norms


@dataclass
class Saves:
    """What autograd keeps for each op of a graph, as a run on abstract tensors shows it.

    Attributes:
        makers: by storage, the node that gave it first.
        made: the tensor of each node that gives one.
        readers: by node that made a storage, the ops whose backward reads that.
        inside: by node, the tensors that its kernel makes and keeps; and what is kept of several results.
        written: storages that an op writes into, or may.
        results: what nodes gave, so that no storage is freed and its number given again.
    """

    makers: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    made: dict[fx.Node, Tensor] = field(default_factory=dict[fx.Node, Tensor])
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict[fx.Node, list[fx.Node]])
    inside: dict[fx.Node, list[Tensor]] = field(default_factory=dict[fx.Node, list[Tensor]])
    written: set[int] = field(default_factory=set[int])
    results: list[Any] = field(default_factory=list[Any])

    def root(self, node: fx.Node) -> fx.Node | None:
        """The node that first gave the storage of the one tensor that ``node`` gives."""
        made = self.made.get(node)
        return None if made is None else self.makers.get(storage_of(made))


class _Run(fx.Interpreter):
    """Runs a graph on abstract tensors of the example's sizes, and records what autograd saves."""

    def __init__(self, graph: fx.Graph, trained: Mapping[str, bool]) -> None:
        super().__init__(nn.Module(), graph=graph)
        self.extra_traceback = False
        self.saves, self.trained, self.concrete = Saves(), trained, concrete_sizes(graph)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        packed: list[Tensor] = []
        with torch.enable_grad(), saved_tensors_hooks(packed.append, as_it_is):  # a part without gradients may fail
            result = self._result(n)
        saves = self.saves
        saves.results.append(result)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                saves.makers.setdefault(storage_of(leaf), n)
        if isinstance(result, Tensor) and result.layout is torch.strided:
            saves.made[n] = result
        for x in packed:
            root = saves.makers.get(storage_of(x))
            if root not in saves.made and x.layout is torch.strided:
                saves.inside.setdefault(root or n, []).append(x)  # which also keeps its storage alive
            readers = saves.readers.setdefault(root, []) if root is not None else []
            readers += [] if n in readers else [n]
        return result

    def _result(self, n: fx.Node) -> Any:
        given = n.op in ("placeholder", "get_attr") or n.target in (working_copy, quantized_copy)
        if not given:
            try:
                return super().run_node(n)
            except Exception:  # it takes no abstract tensors: what it saves is not known, and what it writes into
                read = pytree.tree_leaves([self.env[one] for one in n.all_input_nodes])
                self.saves.written.update(storage_of(x) for x in read if isinstance(x, Tensor))
        trains = self.trained.get(str(n.target), False) if n.op == "get_attr" else self._reads_trained(n)
        return pytree.tree_map_only(Tensor, lambda x: _fresh(x, trains=trains), self.concrete(value(n)))

    def _reads_trained(self, n: fx.Node) -> bool:
        leaves = pytree.tree_leaves([self.env.get(read) for read in n.all_input_nodes])
        return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


def _fresh(x: Tensor, *, trains: bool) -> Tensor:
    if x.layout is not torch.strided:
        return x
    mode = x.fake_mode if isinstance(x, FakeTensor) else FakeTensorMode()
    with mode:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.requires_grad_(trains and (made.is_floating_point() or made.is_complex()))


def find_saves(graph: fx.Graph, trained: Mapping[str, bool]) -> Saves:
    """Find what autograd keeps of each op.

    Args:
        graph: rewritten, with abstract values.
        trained: whether each parameter requires a gradient, by target.
    """
    run = _Run(graph, trained)
    run.garbage_collect_values = False
    inputs = [run._result(node) for node in graph.find_nodes(op="placeholder")]
    with torch._C._DisableAutocast():
        run.run(*inputs, enable_io_processing=False)
    results = (x for x in pytree.tree_leaves(run.saves.results) if isinstance(x, Tensor))
    run.saves.written.update(storage_of(x) for x in results if x._version)
    return run.saves


def choose_saved(
    graph: fx.Graph, trained: Mapping[str, bool], matcher: Matcher, facts: KernelFacts, known: Classification
) -> tuple[PlannedSaved, ...]:
    """Decide how each value that backward reads is kept.

    A value stays as it is if it is small, written into, given by an op of several results, or an output. Values that
    may be recomputed are, where that keeps the fewest bytes: the minimum cut between what cannot be recomputed and what
    backward reads.

    Args:
        graph: rewritten, with abstract values; not changed.
        trained: whether each parameter requires a gradient, by target; buffers are not among them.
        matcher: has the rules.
        facts: name the ops that may run again.
        known: the decisions on the graph.

    Returns:
        A part of the plan for each value that is kept in another way, in the graph's order; none if the graph runs code
        that may do anything.
    """
    if not matcher.op_list.saved or any(map(is_opaque, graph.nodes)):
        return ()
    return _Choice(graph, find_saves(graph, trained), matcher, facts, known, trained.keys()).planned()


class _Choice:
    """The choice for one graph."""

    def __init__(
        self,
        graph: fx.Graph,
        saves: Saves,
        matcher: Matcher,
        facts: KernelFacts,
        known: Classification,
        parameters: Set[str],
    ) -> None:
        self.graph, self.saves, self.op_list, self.facts = graph, saves, matcher.op_list, facts
        self.known, self.parameters, self.written = known, parameters, saves.written
        self.rules = {node: rule for node in graph.nodes if (rule := matcher.saved_of(node)) is not None}
        self.outputs = {saves.root(node) for node in graph.output_node().all_input_nodes}
        self.pinned: set[fx.Node] = set()  # not to be run again
        any_size, masking = self._may_hold()
        self.exact, self.masking = self._exact(any_size), set(map(saves.root, masking))
        self.forms = {node: self._form(node) for node in saves.made if saves.root(node) is node}

    def planned(self) -> tuple[PlannedSaved, ...]:
        """The parts of the plan."""
        read = [node for node in self.saves.readers if self._is_large(node) and not self._is_free(node)]
        there, again = self._cut(read)
        while too_deep := self._too_deep(again):
            self.pinned |= too_deep
            there, again = self._cut(read)
        inside = {node for node in self.saves.inside if self._runs_for_inside(node, there)}
        parts: list[PlannedSaved] = []
        for node in self.graph.nodes:
            if node in inside:
                kind = "drawn" if draws_random_numbers(node) else "computed"
                kept = sum(-(-x.numel() // 8) for x in self.saves.inside[node]) if kind == "drawn" else 0
                parts.append(self._part(node, Keep.RECOMPUTE, self._inside_bytes(node), kept, (node,), inside=kind))
            elif node in self.saves.inside and (size := self._inside_bytes(node)) >= _LEAST:
                parts.append(self._part(node, Keep.COMPUTED, size, size, (node,), inside="computed"))
            if node not in self.forms or node not in there:
                continue
            readers, size = tuple(self.saves.readers.get(node, ())), self._bytes(node)
            before = size if readers else 0
            if node in again:
                if readers:
                    parts.append(self._part(node, Keep.RECOMPUTE, before, 0, readers, self._chain(node, again)))
            elif self._is_free(node):
                if self._is_large(node) and self._is_copied(node):
                    parts.append(self._part(node, Keep.COMPUTED, 0, size, ()))
            else:
                parts.append(self._part(node, self.forms[node], before, self._kept(node), readers))
        return tuple(parts)

    def _may_hold(self) -> tuple[Mapping[fx.Node, fx.Node], Set[fx.Node]]:
        """Values that may hold numbers of any size, each with where they come from; and those that may hold masks.

        What comes from outside of the model may be a mask, and so may what free ops compute with it. But what a product
        or a norm reads, such as a residual stream, is none, wherever it comes from.
        """
        decisions, op_list = self.known.decisions, self.op_list
        floating = dict.fromkeys(n for n in self.graph.nodes if any(t.is_floating_point() for t in tensors(n))).keys()
        left = set(floating)  # what no product or norm reads
        for node in reversed(self.graph.nodes):
            if listed_category(node, op_list) is Category.ALLOW or any(u.argument == "weight" for u in uses(node)):
                left.difference_update(use.node for use in uses(node) if not takes_mask(node, use))
            elif node not in left and (node not in decisions or only_moves(node, op_list)):
                left.difference_update(node.all_input_nodes)

        def follow(node: fx.Node) -> list[fx.Node]:
            found = {n: listed_category(n, op_list) if n in decisions else None for n in node.users if n in left}
            return [reader for reader, category in found.items() if category is None or category.is_free]

        given = {n for n in left if floating.isdisjoint(n.all_input_nodes) and not self._is_copied(n)}
        may_mask = [n for n in floating if n in left and base_name(op_name(n)) in self.facts.holds_masks]
        any_size = reachable((n for n in floating if n in given or n in self.known.wide), follow)
        return any_size, reachable(may_mask, follow).keys()

    def _exact(self, any_size: Mapping[fx.Node, fx.Node]) -> dict[fx.Node | None, str]:
        """Why values may not be rounded: themselves, or for ops that read them and run in float32 for numbers' sake."""
        asked = {one.source for one in self.op_list.demands if one.source is not None}
        reasons = {
            node: one.reason or "it needs all digits"
            for node, one in self.known.decisions.items()
            if one.source in asked
            or (isinstance(one.source, Forced) and one.source.by_numbers)
            or (one.category is Category.DENY and self.op_list.demand(op_name(node)) is not None)
        }
        for node in reversed(self.graph.nodes):  # what the list itself puts in float32 has no other reason there
            if node in reasons and self.known.decisions[node].source == CANCELLATION:
                denied = (n for n in node.all_input_nodes if n not in reasons and self._is_denied(n))
                reasons.update(dict.fromkeys(denied, reasons[node]))
        exact = {self.saves.root(n): f"{start.name} may hold numbers of any size" for n, start in any_size.items()}
        for root, readers in self.saves.readers.items():
            exact.update([(root, f"{n.name} reads it: {reasons[n]}") for n in readers if n in reasons])
            exact.update([(root, f"{n.name} needs all digits of it") for n in readers if not self._bears(n, root)])
        for node in reversed(self.graph.nodes):  # what such values are computed from again
            why = reasons.get(node) or exact.get(self.saves.root(node))
            if why and node in self.saves.made and self._may_rerun(node):
                exact.update(dict.fromkeys(map(self.saves.root, self._sources(node)), f"{node.name} runs again: {why}"))
        return exact

    def _is_denied(self, node: fx.Node) -> bool:
        return node in self.known.decisions and self.known.decisions[node].category is Category.DENY

    def _bears(self, node: fx.Node, root: fx.Node) -> bool:
        """True if the backward of ``node`` is about as exact as ``root``, rounded as the forms do."""
        kind, made = self.facts.bears_rounding.get(base_name(op_name(node))), self.saves.made.get(root)
        if kind == "numbers" or made is None:
            return True
        if kind is None:
            return False
        row = row_dim(made)
        for n in self._sources(node):
            if self.saves.root(n) is root:
                read = self.saves.made[n]
                at = row_dim(read)
                is_same = (read.shape[at], read.stride(at)) == (made.shape[row], made.stride(row))
                if not is_same or at < (read.dim() - 1 if kind == "rows" else 2):
                    return False
        return True

    def _cut(self, read: list[fx.Node]) -> tuple[frozenset[fx.Node], set[fx.Node]]:
        """Return the nodes whose values backward has, and those of them that run again, for the fewest bytes."""
        terms = [*map(self._term, self.saves.made), *self._inside_terms()]
        there = cheapest(
            terms, dict.fromkeys([*read, *(label for term in self._inside_terms() for label in term.lows)], True)
        )
        nodes = {node for node in self.saves.made if node in there}
        return frozenset(nodes), {n for n in nodes if self._may_rerun(n) and nodes.issuperset(self._sources(n))}

    def _inside_terms(self) -> list[Term]:
        """The bytes of what kernels make inside of them, to pay unless backward has their inputs."""
        inside = [node for node in self.saves.inside if self._may_run_for_inside(node) and self._sources(node)]
        return [Term(self._inside_bytes(n), ((n, "inside"),), tuple(self._sources(n))) for n in inside]

    def _inside_bytes(self, node: fx.Node) -> int:
        return sum({storage_of(x): x.untyped_storage().nbytes() for x in self.saves.inside[node]}.values())

    def _may_run_for_inside(self, node: fx.Node) -> bool:
        rule = self.rules.get(node)
        by_rule = rule is not None and rule.effect is Keep.RECOMPUTE and self._is_cheap(node)
        is_large = self._inside_bytes(node) >= _LEAST
        return by_rule and is_large and not draws_random_numbers(node) and not self._reads_written(node)

    def _runs_for_inside(self, node: fx.Node, there: frozenset[fx.Node]) -> bool:
        """True if what the kernel of ``node`` makes and keeps is made again in backward."""
        return self._redraws(node) or (self._may_run_for_inside(node) and there.issuperset(self._sources(node)))

    def _too_deep(self, again: set[fx.Node]) -> set[fx.Node]:
        """The first nodes of chains that are too long."""
        depths: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node in again:
                before = max((depths.get(read, 0) for read in self._sources(node)), default=0)
                depths[node] = before + (not self._is_view(node))
        return {n for n, depth in depths.items() if depth == _DEEPEST + 1 and not self._is_view(n)}

    def _part(
        self,
        node: fx.Node,
        keep: Keep,
        before: int,
        kept: int,
        readers: tuple[fx.Node, ...],
        again: tuple[fx.Node, ...] = (),
        *,
        inside: str = "",
    ) -> PlannedSaved:
        rule = self.rules.get(node)
        said = " ".join(filter(None, (rule.reason, f"({rule.source})" if rule.source else ""))) if rule else ""
        is_asked = keep is not Keep.COMPUTED or (rule is not None and rule.effect is keep)
        return PlannedSaved(
            *(node.name, op_name(node), module_path(node), keep, before, kept),
            readers=tuple(reader.name for reader in readers),
            because=said if is_asked else self._why_computed(node, inside),
            recomputes=(node.name,) if inside and keep is Keep.RECOMPUTE else tuple(one.name for one in again),
            inside=inside,
            smaller=() if inside or keep is Keep.RECOMPUTE else self._smaller(node),
        )

    def _why_computed(self, node: fx.Node, inside: str) -> str:
        """Why a value is kept as computed that no rule asks for."""
        rule = self.rules.get(node)
        if inside:
            return "its kernel makes it, and is not run again for it"
        if node not in self.saves.readers or self._is_free(node):
            return "others are recomputed from it"
        if rule is None:
            return "no rule covers it"
        if node.op == "placeholder" or node in self.outputs:
            return "an input or output of the model, which the caller has"
        if not self._may_change(node):
            return "it is written into, or holds no numbers to change"
        if rule.effect is not Keep.RECOMPUTE and node in self.exact:
            return f"it may not be rounded: {self.exact[node]}"
        if rule.effect is Keep.RECOMPUTE:
            return "recomputing it would keep more bytes" if self._is_cheap(node) else f"{op_name(node)} is not cheap"
        return f"{rule.effect.value} is not smaller"

    def _form(self, node: fx.Node) -> Keep:
        """The form in which a value that is kept is kept."""
        keep = self.rules[node].effect if node in self.rules else Keep.COMPUTED
        return keep if any(size.keep is keep for size in self._smaller(node)) else Keep.COMPUTED

    def _smaller(self, node: fx.Node) -> tuple[SavedSize, ...]:
        made = self.saves.made[node]
        if made.dtype not in (torch.float32, *LOW_DTYPES) or not self._may_change(node) or node in self.exact:
            return ()
        forms = {k: form for k, form in FORMS.items() if not (k is Keep.FLOAT8 and node in self.masking)}
        sizes = (SavedSize(k, sum(x.nbytes for x in form.pack(made.detach()))) for k, form in forms.items())
        return tuple(size for size in sizes if size.bytes < made.nbytes)

    def _may_change(self, node: fx.Node) -> bool:
        made = self.saves.made[node]
        is_computed = node.op == "call_function" and not self._is_free(node)
        return (
            is_computed and self._is_large(node) and node not in self.outputs and storage_of(made) not in self.written
        )

    def _is_large(self, node: fx.Node) -> bool:
        made = self.saves.made.get(node)
        return made is not None and made.numel() >= _LEAST

    def _is_free(self, node: fx.Node) -> bool:
        """True for what is there in backward in any case: parameters, buffers and their copies."""
        return node.op == "get_attr" or node.target in (working_copy, quantized_copy)

    def _is_copied(self, node: fx.Node) -> bool:
        """True for a parameter, which ops that run again read as it was: optimizers may write it unseen."""
        return str(node.target) in self.parameters

    def _is_view(self, node: fx.Node) -> bool:
        return self.saves.root(node) is not node

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [read for read in node.all_input_nodes if read in self.saves.made]

    def _may_rerun(self, node: fx.Node) -> bool:
        if node.op != "call_function" or self._is_free(node) or storage_of(self.saves.made[node]) in self.written:
            return False
        if self._reads_written(node) or any(isinstance(value(r), (list, tuple)) for r in node.all_input_nodes):
            return False  # the latter is an item of several results
        if self._is_view(node):
            return True
        if node in self.pinned or all(map(self._is_free, self._sources(node))):
            return False  # the latter reads parameters alone, whose ``data`` may be written into unseen
        if draws_random_numbers(node) and not (node in self.saves.inside and self._redraws(node)):
            return False
        rule = self.rules.get(node)
        return rule is not None and rule.effect is Keep.RECOMPUTE and self._is_cheap(node) and self._may_change(node)

    def _reads_written(self, node: fx.Node) -> bool:
        """True for an op that reads what is written into, or a float buffer, which batch norm writes into unseen."""
        made = {read: self.saves.made[read] for read in self._sources(node)}
        buffers = (x for read, x in made.items() if read.op == "get_attr" and str(read.target) not in self.parameters)
        return any(storage_of(x) in self.written for x in made.values()) or any(
            x.is_floating_point() and x.numel() > 1 for x in buffers
        )

    def _is_cheap(self, node: fx.Node) -> bool:
        return base_name(op_name(node)) in self.facts.recomputes

    def _redraws(self, node: fx.Node) -> bool:
        rule = self.rules.get(node)
        by_rule = rule is not None and rule.effect is Keep.RECOMPUTE
        return by_rule and draws_random_numbers(node) and self._is_cheap(node) and self._is_large(node)

    def _term(self, node: fx.Node) -> Term:
        """The bytes to pay for a value in backward: none if it can run again from values that backward has."""
        sources = tuple(self._sources(node)) if self._may_rerun(node) else ()
        if self._is_free(node) or (self._may_rerun(node) and not sources):
            return Term(self._bytes(node) if self._is_copied(node) else 0, (node,))
        if self._is_view(node):
            return Term(None, (node,), sources) if sources else Term(self._bytes(node), (node,))
        return Term(self._kept(node), (node,), sources)

    def _bytes(self, node: fx.Node) -> int:
        return self.saves.made[node].untyped_storage().nbytes()

    def _kept(self, node: fx.Node) -> int:
        form = self.forms.get(node, Keep.COMPUTED)
        if form is Keep.COMPUTED:
            return self._bytes(node)
        return next(size.bytes for size in self._smaller(node) if size.keep is form)

    def _chain(self, node: fx.Node, again: set[fx.Node]) -> tuple[fx.Node, ...]:
        """The nodes that run again to give ``node``, in order."""
        chain: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            one = stack.pop()
            if one in again and one not in chain:
                chain[one] = None
                stack += self._sources(one)
        return tuple(one for one in self.graph.nodes if one in chain)
