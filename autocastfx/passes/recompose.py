"""Replaces what a model writes out by the one operator that computes it, in place, before anything is decided.

Written out, one op of a chain may be float32 by its list, and that draws the others with it; the operator computes in
float32 inside and may take and give 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch._decomp import decompositions
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn import functional as F

from autocastfx.graph import alias
from autocastfx.graph.magnitude import is_here
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import (
    all_names,
    argument,
    constants,
    draws_random_numbers,
    elements,
    example_size,
    has_float32,
    is_float32,
    module_classes,
    place_like,
    schema,
    set_argument,
    set_value,
    stand_for,
    tensors,
    uses,
    value,
)
from autocastfx.passes.patterns.patterns import (
    GROUPED_ATTENTION,
    MATH_ATTENTION,
    PATTERNS,
    REPEATED,
    SHORT_ATTENTION,
    Arguments,
    Pattern,
)
from autocastfx.passes.state import Pass, Settings, State
from autocastfx.plan.plan import Recomposed
from autocastfx.policy.rule import Category
from autocastfx.runtime.operators.short_attention import TOKENS, short_attention

# Tell which values hold finite numbers alone, whatever the inputs.

# Ops that make finite values of finite ones as masks are made, beside views and copies: choices and products.
_CHOICES = ("where", "masked_fill", "mul", "neg", "sub", "rsub", "add", "embedding")
_FILLED = ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_STAYS_FINITE = frozenset((*_CHOICES, *_FILLED, "scalar_tensor"))


def is_made_finite(made: fx.Node, attributes: Mapping[str, Any], written: Collection[fx.Node]) -> bool:
    """True if ``made`` is made of finite numbers, seen or looked up in a table, by ops that keep them finite.

    Args:
        made: the node, as of a mask.
        attributes: what ``get_attr`` nodes read, parameters and buffers apart.
        written: values in whose storage something writes.
    """
    made_of = set(
        alias.reachable([made], lambda n: filter(has_float32, n.all_input_nodes) if _is_looked_into(n) else ())
    )
    return made_of.isdisjoint(written) and all(_stays_finite(node, attributes) for node in made_of)


def _is_looked_into(node: fx.Node) -> bool:
    return op_name(node) not in ("embedding", "lift_fresh_copy")


def _stays_finite(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    if op_name(node) == "lift_fresh_copy":  # of a constant in the code
        constant = attributes.get(str(node.all_input_nodes[0].target))
        return isinstance(constant, torch.Tensor) and is_here(constant) and bool(constant.isfinite().all())
    is_finite = base_name(op_name(node)) in _STAYS_FINITE or alias.is_view_or_copy(node)
    return is_finite and all(math.isfinite(n) for _, n in constants(node))


_READS_LAYOUT = ("view", "view_as", "_unsafe_view", "unflatten", "as_strided")


def recompose(
    graph: fx.Graph, patterns: Sequence[Pattern], ruled: Callable[[fx.Node], object], attributes: Mapping[str, Any]
) -> tuple[Recomposed, ...]:
    """Replace each occurrence of a pattern in ``graph``, in place, where no other value can change.

    An occurrence stays as it is if anything else reads a value inside it, if a value of it is not float32, if something
    writes into the storage of an input, or if the result is viewed and would be laid out in another way. Of two that
    overlap the longer is taken.

    Args:
        graph: captured, with abstract values.
        patterns: earlier ones are tried first.
        ruled: what the rules for modules say of a node; an occurrence in which that differs stays as it is.
        attributes: what ``get_attr`` nodes read, parameters and buffers apart.
    """
    ops = frozenset(op_name(node) for node in graph.nodes)
    patterns = [pattern for pattern in patterns if pattern.may_be_in(ops)]
    if not patterns:
        return ()
    mutated = set(alias.alias_sets(graph))
    done: list[Recomposed] = []
    for node in reversed(graph.nodes):  # from the end: the last op of the longer comes first
        for pattern in patterns:
            occurrence = _occurrence(pattern, node, mutated, ruled, attributes)
            if occurrence is not None:
                arguments, inside = occurrence
                made = _made(graph, pattern, node, arguments)
                done.append(Recomposed(pattern.name, made.name, tuple(n.name for n in inside)))
                for replaced in reversed(inside):
                    graph.erase_node(replaced)
                break
    return tuple(reversed(done))


def _occurrence(
    pattern: Pattern,
    node: fx.Node,
    mutated: set[fx.Node],
    ruled: Callable[[fx.Node], object],
    attributes: Mapping[str, Any],
) -> tuple[Arguments, list[fx.Node]] | None:
    """The operator's arguments for the occurrence of ``pattern`` that ends at ``node``, and all its nodes in order."""
    for values, arguments in pattern.occurrences(node):
        sources = [source for source in values.values() if isinstance(source, fx.Node)]
        inside = _between(sources, node)
        if pattern.own_layout and _layout_is_read(node):
            return None
        is_closed = all(user in inside for n in inside if n is not node for user in n.users)
        is_plain = mutated.isdisjoint(sources) and all(_is_plain(n) for n in sources) and all(map(_is_wide, inside))
        is_one = is_plain and all(_device(n) == _device(node) for n in (*sources, *inside))
        is_finite = all(is_made_finite(values[name], attributes, mutated) for name in pattern.finite)
        if is_closed and is_one and is_finite and all(ruled(n) == ruled(node) for n in inside):
            return arguments, sorted(inside)
    return None


def _between(sources: Sequence[fx.Node], end: fx.Node) -> set[fx.Node]:
    """``end`` and all that it is computed from, up to ``sources``."""
    return set(alias.reachable([end], lambda node: (read for read in node.all_input_nodes if read not in sources)))


def _layout_is_read(node: fx.Node) -> bool:
    """True if anything depends on the result's strides: a ``view`` of other strides may fail."""
    same_layout = alias.reachable([node], lambda n: filter(_passes_layout, n.users))
    return any(op_name(user) in _READS_LAYOUT for each in same_layout for user in each.users)


def _passes_layout(node: fx.Node) -> bool:
    return op_name(node) == "dropout" or (alias.is_view(node) and not alias.takes_any_layout(node))


def _is_plain(node: fx.Node) -> bool:
    return is_float32(node) and _is_wide(node)


def _is_wide(node: fx.Node) -> bool:
    """True if the node computes with float32 alone; it may give integers too, as ``max`` does."""
    return has_float32(node) and all(
        t.layout == torch.strided and (t.dtype == torch.float32 or not t.dtype.is_floating_point) for t in tensors(node)
    )


def _device(node: fx.Node) -> torch.device:
    return tensors(node)[0].device


def _made(graph: fx.Graph, pattern: Pattern, node: fx.Node, arguments: Arguments) -> fx.Node:
    """The operator on ``arguments``, in the place of ``node``."""
    args, kwargs = arguments
    with graph.inserting_before(node):
        name = f"{node.name}_{pattern.op.rpartition('::')[2]}"
        made = graph.create_node("call_function", pattern.target, args, kwargs, name)
    place_like(made, node)
    set_value(made, value(node))
    stand_for(made, *all_names(node))
    node.replace_all_uses_with(made)
    return made


class Recompose(Pass):
    """Replaces formulas by operators: the patterns chosen, of which the list bans no operator."""

    name = "recompose"

    def __call__(self, state: State) -> State:
        """The state with what was recomposed."""
        rule = self.settings.op_list.rule
        recomposed = recompose(
            state.graph,
            list(filter(self._is_wanted, PATTERNS)),
            lambda node: [kind for kind in module_classes(node) if rule(kind) is not None],
            state.attributes,
        )
        return state.with_recomposed((*state.recomposed, *recomposed)) if recomposed else state

    def _is_wanted(self, pattern: Pattern) -> bool:
        settings, rule = self.settings, self.settings.op_list.rule(pattern.op)
        is_banned = rule is not None and rule.category is Category.BAN
        has_range = settings.low == torch.bfloat16 or not pattern.needs_range
        return pattern.name in settings.recompose and has_range and not is_banned


# Replaces torch's attention on a CPU: by its formula where there is dropout, by our operator for few tokens.
#
# Fused attention on a CPU knows no dropout. With it torch takes the formula: it widens query, key and value, and
# keeps all weights in float32 for backward. Written out, the products are 16-bit ones, and the list decides the
# softmax.
#
# Without dropout it stays one operator; that of this package goes backward faster where sequences are short.

# The ops that stand for attention.
_PARTS = ("mul", "transpose", "matmul", "new_ones", "tril", "where", "add", "softmax", "_safe_softmax", "dropout")
_aten: Any = torch.ops.aten


def _has_few_tokens(read: fx.Node) -> bool:
    """In the example: when called, the operator looks itself."""
    return is_float32(read) and tensors(read)[0].ndim == 4 and _sizes(read)[-2] <= TOKENS


_READS = ("query", "key", "value", "attn_mask")


def _written_out(node: fx.Node, scale: float) -> fx.Node:
    """The last node of the formula that gives what ``node`` gives, put before it."""
    query, key, values, mask = (argument(node, name) for name in _READS)
    mode = getattr(tensors(node)[0], "fake_mode", nullcontext())  # for the tensors that operators make of numbers

    def op(part: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name = f"{node.name.replace('scaled_dot_product_', '')}_{part}"
        with node.graph.inserting_before(node):
            made = node.graph.create_node("call_function", target, args, kwargs, name)
        place_like(made, node)
        with mode:
            set_value(made, target(*map_arg(args, value), **map_arg(kwargs, value)))
        return made

    def size(read: fx.Node) -> Any:
        length = tensors(read)[0].shape[-2]
        return length if isinstance(length, int) else op("size", _aten.sym_size.int, read, -2)

    scaled = query if scale == 1 else op("scaled", _aten.mul.Tensor, query, scale)
    scores = op("scores", _aten.matmul.default, scaled, op("keys", _aten.transpose.int, key, -2, -1))
    softmax = _aten.softmax.int if mask is None else _aten._safe_softmax.default  # a mask may hide all of a row
    if argument(node, "is_causal"):
        sizes = [size(query), size(key)]
        ones = op("ones", _aten.new_ones.default, scores, sizes, dtype=torch.bool)
        mask = op("causal", _aten.tril.default, ones)
    if mask is not None and _is_bool(mask):
        scores = op("masked", _aten.where.ScalarOther, mask, scores, -math.inf)
    elif mask is not None:
        scores = op("masked", _aten.add.Tensor, scores, mask)
    kept = op("dropout", _aten.dropout.default, op("softmax", softmax, scores, -1), argument(node, "dropout_p"), True)
    return op("values", _aten.matmul.default, kept, values)


def _scale_of_plain(node: fx.Node) -> float | None:
    """By what attention scales its scores, if it can be written out; None if it cannot."""
    query, key, values, mask = (argument(node, name) for name in _READS)
    dropout, scale = argument(node, "dropout_p"), argument(node, "scale")
    is_plain = all(is_float32(read) and elements(read) for read in (query, key, values))
    if is_plain and scale is None and isinstance(tensors(query)[0].shape[-1], int):
        scale = 1 / math.sqrt(tensors(query)[0].shape[-1])
    drops = isinstance(dropout, float) and dropout > 0
    if not (is_plain and drops and isinstance(scale, float)) or argument(node, "enable_gqa"):
        return None
    if mask is not None and not ((is_float32(mask) or _is_bool(mask)) and _fits(mask, query, key)):
        return None
    return scale


def _fits(mask: fx.Node, query: fx.Node, key: fx.Node) -> bool:
    """True if the scores keep their sizes under ``mask``, in the example: torch refuses it otherwise."""
    q, k, given = (_sizes(node) for node in (query, key, mask))
    scores = (*torch.broadcast_shapes(q[:-2], k[:-2]), q[-2], k[-2])
    return tuple(torch.broadcast_shapes(scores, given)) == scores


def _sizes(node: fx.Node) -> Sequence[int]:
    return [example_size(size) for size in tensors(node)[0].shape]


def _is_bool(node: fx.Node) -> bool:
    return tensors(node)[0].dtype == torch.bool


# Cells of recurrent layers, whose kernels in 16 bits round the state that they add up, at each step. In torch's own
# formula the products run in 16 bits, and the state does not.


_CELLS = ("lstm_cell", "gru_cell")


def _cell(x: Any, state: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    if not isinstance(state, list):
        return decompositions.gru_cell_data(x, state.float(), w_ih, b_ih, w_hh, b_hh)
    return decompositions.lstm_cell(F.linear(x, w_ih, b_ih), state[0], state[1].float(), w_hh, b_hh, None, 1)


def _in_parts(cell: fx.Node) -> dict[fx.Node, fx.Node]:
    """What gives the values of ``cell``, by the nodes that give them now: parts of it, put before it."""
    reads = cell.all_input_nodes
    formula = make_fx(lambda *given: _cell(*map_arg(cell.args, lambda n: given[reads.index(n)])), pre_dispatch=True)
    parts = formula(*map(value, reads)).graph
    copies = dict(zip(parts.find_nodes(op="placeholder"), reads, strict=True))
    with cell.graph.inserting_before(cell):
        made: Any = cell.graph.graph_copy(parts, copies)
    for part in (n for n in parts.nodes if n.op == "call_function"):
        place_like(copies[part], cell)
        set_value(copies[part], value(part))
    return {user: made[cast("int", user.args[1])] for user in cell.users} if isinstance(made, tuple) else {cell: made}


class WriteOut(Pass):
    """Replaces LSTM and GRU cells by their formula, and attention with dropout on a CPU, where lists allow 16 bits.

    A person's own rule keeps a cell whole. Attention stays if its parts may not run in 16 bits, if it groups heads, if
    its scale is not known, if a size is 0, if a mask is larger than the scores, and if it reads what is not float32.
    Dropout draws the same numbers.
    """

    name = "write out"

    def __call__(self, state: State) -> State:
        """The state with what was written out."""
        takes_attention = MATH_ATTENTION in self.settings.recompose and _rounds_parts(self.settings, state)
        recomposed: list[Recomposed] = []
        for node in list(state.graph.nodes):
            is_attention, is_cell = op_name(node) == "scaled_dot_product_attention", op_name(node) in _CELLS
            rule = self.settings.matcher(node) if is_cell or (is_attention and takes_attention) else None
            if rule is None or rule.category is not Category.ALLOW:
                continue
            results: dict[fx.Node, fx.Node] = {}
            if is_attention and (scale := _scale_of_plain(node)) is not None:
                results = {node: _written_out(node, scale)}
            elif is_cell and rule.shipped and all(map(is_float32, node.all_input_nodes)):
                results = _in_parts(node)
            for old, new in results.items():
                old.replace_all_uses_with(new)
                stand_for(new, *all_names(old))
            for old in dict.fromkeys((*results, node)) if results else ():
                state.graph.erase_node(old)
            pattern = MATH_ATTENTION if is_attention else "recurrent_cell"
            recomposed += [Recomposed(pattern, new.name, (node.name,)) for new in list(results.values())[:1]]
        return state.with_recomposed((*state.recomposed, *recomposed)) if recomposed else state


class RecomputeAttention(Pass):
    """Makes of attention of few tokens without dropout that of this package, likewise."""

    name = "recompute attention"

    def __call__(self, state: State) -> State:
        """The state with what was replaced."""
        if SHORT_ATTENTION not in self.settings.recompose or not _rounds_parts(self.settings, state):
            return state
        recomposed: list[Recomposed] = []
        for node in state.graph.nodes:
            is_attention = node.target is _aten.scaled_dot_product_attention.default
            if is_attention and self.settings.category(node) is Category.ALLOW:
                is_other = argument(node, "dropout_p") or argument(node, "enable_gqa")
                if not is_other and all(_has_few_tokens(argument(node, name)) for name in ("query", "key")):
                    node.target = short_attention
                    recomposed.append(Recomposed(SHORT_ATTENTION, node.name, (node.name,)))
        return state.with_recomposed((*state.recomposed, *recomposed)) if recomposed else state


class GroupHeads(Pass):
    """Lets attention in 16 bits read keys and values that several heads share, in the place of a copy for each head.

    By kernel facts, where a device's fused attention does so. It takes no mask then.
    """

    name = "group heads"

    def __call__(self, state: State) -> State:
        """The state with what was dropped."""
        settings = self.settings
        if GROUPED_ATTENTION not in settings.recompose or settings.device not in settings.facts.groups_heads:
            return state
        written, grouped = alias.alias_sets(state.graph).keys(), list[Recomposed]()
        for node in state.graph.find_nodes(op="call_function", target=_aten.scaled_dot_product_attention.default):
            copies = [_repeated_heads(argument(node, name)) for name in ("key", "value")]
            is_other = argument(node, "attn_mask") is not None or argument(node, "enable_gqa")
            if is_other or not all(copies) or settings.category(node) is not Category.ALLOW:
                continue
            chains = [[one for one in chain if len(one.users) == 1 and one not in written] for chain in copies]
            if any(len(chain) < len(whole) for chain, whole in zip(chains, copies, strict=True)):
                continue
            shared = [chain[-1].all_input_nodes[0] for chain in chains]
            if len({value(one).shape[:2] for one in shared}) > 1:
                continue
            for name, one in zip(("key", "value"), shared, strict=True):
                set_argument(node, name, one)
            set_argument(node, "enable_gqa", True)
            dropped = {copied: one for chain, one in zip(chains, shared, strict=True) for copied in chain}
            for copied, one in dropped.items():
                stand_for(one, *all_names(copied))
                state.graph.erase_node(copied)
            grouped.append(Recomposed(GROUPED_ATTENTION, node.name, tuple(copied.name for copied in dropped)))
        return state.with_recomposed((*state.recomposed, *grouped)) if grouped else state


def _repeated_heads(copied: fx.Node) -> list[fx.Node]:
    """Return the nodes that copy each head, dimension 1 of 4, several times in a row, last first; none for others."""
    if op_name(copied) == "repeat_interleave" and isinstance(value(copied), torch.Tensor):
        is_of_heads = isinstance(argument(copied, "repeats"), int) and argument(copied, "dim") in (1, -3)
        return [copied] if is_of_heads and value(copied).ndim == 4 else []
    if op_name(copied) not in ("reshape", "view") or value(copied).ndim != 4:
        return []
    chain = [copied]
    for names in (("clone", "contiguous"), ("expand",), ("unsqueeze",)):
        read = chain[-1].all_input_nodes[0]
        if op_name(read) in names:
            chain.append(read)
        elif "clone" not in names:
            return []
    batch, heads, times, *rest = value(chain[-2]).shape
    is_of_heads = value(chain[-1]).shape[2] == 1
    return chain if is_of_heads and [*value(copied).shape] == [batch, heads * times, *rest] else []


def _rounds_parts(settings: Settings, state: State) -> bool:
    """True where the list lets the parts of attention on a CPU give 16 bits each; float16 does not hold all scores."""
    is_kernel = settings.fold == "kernel" and settings.low == torch.bfloat16
    if not is_kernel or settings.device != "cpu":
        return False
    rules = {op: settings.op_list.rule(op, settings.device) for op in _PARTS}
    categories = {op: settings.op_list.unlisted if rule is None else rule.category for op, rule in rules.items()}
    return categories["matmul"] is Category.ALLOW and not {Category.BAN, Category.KEEP} & {*categories.values()}


_STATISTICS = ("running_mean", "running_var")  # norms that take them write to them, which their schemas do not say


def _is_pure(node: fx.Node) -> bool:
    """True if ``node`` gives the same float32 value whenever it is called with the same numbers."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not is_float32(node):
        return False
    return not (draws_random_numbers(node) or op._schema.is_mutable or _keeps_statistics(node))


def _statistics(graph: fx.Graph) -> set[fx.Node]:
    """Return the running statistics of norms, and all values made of these by other ops."""
    norms = [node for node in graph.nodes if _keeps_statistics(node)]
    statistics = {use.node for norm in norms for use in uses(norm) if use.argument in _STATISTICS}
    names = {node.target for node in statistics if node.op == "get_attr"}
    for node in graph.nodes:
        is_kept = node.op == "get_attr" and node.target in names
        if is_kept or (not _keeps_statistics(node) and not statistics.isdisjoint(node.all_input_nodes)):
            statistics.add(node)
    return statistics


def _keeps_statistics(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not set(_STATISTICS).isdisjoint(schema(node.target).names)


class MergeRepeated(Pass):
    """Merges float32 values that the model computes twice: T5 makes the same mask in each layer.

    Repeated is a call of the same operator of torch's with the same arguments. Not one that is random, that keeps or
    reads running statistics, that shares storage which is written to or may be, or reads such, or that is handed out.
    Nor more of them than the list's ``backward_depth``, for the gradients of all that read the one value are added up.
    """

    name = "merge repeated"

    def __call__(self, state: State) -> State:
        """The state with what was merged: the readers of each repeated value read the first of its kind."""
        if REPEATED not in self.settings.recompose:
            return state
        graph, rule = state.graph, self.settings.matcher  # where the rule that decides a node differs, results may
        changing = alias.alias_sets(graph).keys() | alias.seen_by_functions(graph, state.attributes)
        changing |= _statistics(graph)
        outputs = alias.handed_out(graph)
        first: dict[tuple[object, str], fx.Node] = {}
        merged: dict[fx.Node, list[str]] = {}
        limit = self.settings.op_list.backward_depth
        most = math.inf if limit is None or limit.most is None else limit.most
        for node in list(graph.nodes):
            if _is_pure(node) and node not in outputs and changing.isdisjoint((node, *node.all_input_nodes)):
                call = f"{node.args} {node.kwargs}"  # as text, in which 1, 1.0 and True differ, and 0.0 and -0.0
                kept = first.setdefault((node.target, call), node)
                if 1 + len(merged.get(kept, ())) >= most:
                    kept = first[node.target, call] = node
                if kept is not node and rule(kept) == rule(node):
                    node.replace_all_uses_with(kept)
                    stand_for(kept, *all_names(node))
                    graph.erase_node(node)
                    merged.setdefault(kept, []).append(node.name)
        if not merged:
            return state
        kept_for = {name: kept.name for kept, names in merged.items() for name in names}
        before = (replace(one, node=kept_for.get(one.node, one.node)) for one in state.recomposed)
        repeated = (Recomposed(REPEATED, kept.name, tuple(names)) for kept, names in merged.items())
        return state.with_recomposed((*before, *repeated))
