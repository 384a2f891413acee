"""Find values of a graph that share storage, the nodes that write into it, and what code outside the graph sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from autocastfx.graph.names import FUNCTIONS, op_name
from autocastfx.graph.node import (
    attributes_of,
    dtypes,
    note_writes,
    schema,
    subgraphs,
    tensors,
    uses,
    value,
    written_inside,
)

# Find nodes that run code outside the graph. Such code may have side effects that no schema declares.

_NAMESPACES = ("aten", "prim", "prims", "autocastfx")
_PACKAGES = ("torch", "autocastfx", "math", "operator", "_operator", "builtins")


def is_opaque(node: fx.Node) -> bool:
    """True if ``node`` calls a module, a custom operator, an ``autograd.Function``, or a function of a third party.

    Functions of torch and of Python's ``math`` and ``operator`` are not opaque, nor are sub-graphs.
    """
    target = node.target
    if node.op == "call_module":
        return True
    if node.op != "call_function" or isinstance(target, HigherOrderOperator):
        return False
    if isinstance(target, OpOverload):
        return target.namespace not in _NAMESPACES
    if not isinstance(target, FUNCTIONS) or isinstance(getattr(target, "__self__", None), type):
        return True
    module = getattr(target, "__module__", None)
    return module is not None and module.split(".")[0] not in _PACKAGES


# Breadth-first search: all that can be reached from some nodes by steps from each to its neighbours.

T = TypeVar("T", bound=Hashable)


def reachable(starts: Iterable[T], neighbours: Callable[[T], Iterable[T]]) -> dict[T, T]:
    """The ``starts`` and all that they lead to, nearest first, each with the start that leads to it first.

    Args:
        starts: each leads to itself.
        neighbours: one step further; called once for each that is reached.
    """
    reached = {start: start for start in starts}
    queue = deque(reached)
    while queue:
        here = queue.popleft()
        for near in neighbours(here):
            if near not in reached:
                reached[near] = reached[here]
                queue.append(near)
    return reached


# Find values of a graph that share storage, and the nodes that write into it.


def mutated_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that ``node`` writes into, by its schema, or as noted of the graph that it runs."""
    if not isinstance(node.target, OpOverload):
        return written_inside(node)
    written = schema(node.target).written
    return tuple(u.node for u in uses(node) if u.argument in written) if written else ()


def note_inner_writes(node: fx.Node, inside: fx.Graph, passed: Sequence[Any] | None = None) -> None:
    """Note which arguments of ``node`` the graph ``inside``, which it runs, writes into, directly or through views.

    Args:
        node: of a higher-order operator, or of activation checkpointing.
        inside: the graph.
        passed: what its inputs are; by default the last arguments of ``node``.
    """
    inputs, written = inside.find_nodes(op="placeholder"), alias_sets(inside).keys()
    passed = node.args[-len(inputs) :] if passed is None else passed
    values = [value for given, value in zip(inputs, passed, strict=False) if given in written]
    if places := tuple(i for i, given in enumerate(node.args) if any(given is one for one in values)):
        note_writes(node, places)


def moves(node: fx.Node) -> bool:
    """True for a node that reads and writes elements; false for views and members of a tuple."""
    return bool(mutated_inputs(node)) or not any(aliased(node))


@dataclass(frozen=True)
class AliasSet:
    """Values that share a mutated storage: the node that made it (``root``), and all that view or mutate it."""

    root: fx.Node
    members: frozenset[fx.Node]


def alias_sets(
    graph: fx.Graph, written_by: Callable[[fx.Node], tuple[fx.Node, ...]] = mutated_inputs
) -> dict[fx.Node, AliasSet]:
    """Return, for each value with mutated storage, its alias set. A writer is in the set that it writes to.

    Sharing is known from the storages of the abstract values, and from the alias annotations of the operators' schemas
    (a view that copies in the abstract run may alias in a real one).
    """
    written = {target for node in graph.nodes for target in mutated_inputs(node)}
    if not written:
        return {}
    sharing: dict[fx.Node, set[fx.Node]] = {node: set() for node in graph.nodes}

    def share(a: fx.Node, b: fx.Node) -> None:
        sharing[a].add(b)
        sharing[b].add(a)

    owners: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for tensor in (t for t in tensors(node) if t.layout == torch.strided):
            share(owners.setdefault(storage_of(tensor), node), node)
        for use in aliased(node):
            share(use, node)
        for target in written_by(node):
            share(target, node)
    sets: dict[fx.Node, AliasSet] = {}
    for made in (root for root in graph.nodes if root not in sets):
        members = frozenset(reachable([made], sharing.__getitem__))
        sets.update(dict.fromkeys(members, AliasSet(made, members)))
    return {node: one for node, one in sets.items() if not written.isdisjoint(one.members)}


def storage_of(x: torch.Tensor) -> int:
    """A number for the memory of a tensor that is alive; one of its own for what has several, as sparse ones do."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else -id(x)


def aliased(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs that an output of ``node`` may share storage with."""
    if op_name(node) == "getitem":
        yield from node.all_input_nodes[:1]
    elif isinstance(node.target, OpOverload) and (sharing := schema(node.target).shared):
        yield from (u.node for u in uses(node) if u.argument in sharing)


def seen_by_functions(graph: fx.Graph, attributes: Mapping[str, Any]) -> set[fx.Node]:
    """Return the values read, directly or as an alias, by functions without a schema, which may write into them.

    Args:
        graph: captured, with abstract values.
        attributes: the graphs of its higher-order operators; those that write into nothing are no such functions.
    """
    opaque = (node for node in graph.nodes if node.op == "call_function" and _may_write_unseen(node, attributes))
    starts = (read for node in opaque for read in node.all_input_nodes if tensors(read))
    return set(reachable(starts, lambda node: (*aliased(node), *(r for r in node.users if node in aliased(r)))))


def _may_write_unseen(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    if isinstance(node.target, OpOverload) or op_name(node) == "getitem":
        return False
    inner = subgraphs(node, attributes).values()
    return not inner or any(_writes_or_hands_on(module) for module in inner)


def _writes_or_hands_on(module: fx.GraphModule) -> bool:
    """True if a graph may write into what it is given, or gives a view of it, into which others may write."""
    attributes, nodes = attributes_of(module, module.graph), module.graph.nodes
    writes = any(mutated_inputs(node) for node in nodes) or bool(seen_by_functions(module.graph, attributes))
    return writes or any(node.op in ("placeholder", "get_attr") for node in handed_out(module.graph))


def handed_out(graph: fx.Graph) -> set[fx.Node]:
    """Return the outputs, and the values that they may be views of."""
    return set(reachable(graph.output_node().all_input_nodes, aliased))


# Ops that give elements of their input as they are: views, by torch's schemas, and copies.

_COPIES = ("clone", "_to_copy", "_unsafe_view", "repeat", "tile", "type_as")  # their schemas name no shared storage
_ANY_LAYOUT = ("clone", "contiguous", "flatten", "ravel", "reshape", "reshape_as")  # they copy where they have to
# They share storage with their input and give other numbers.
_REINTERPRETS = ("_conj", "_neg_view", "imag", "real", "view_as_complex", "view_as_real")
_REPEATS = ("as_strided", "broadcast_to", "expand", "expand_as", "repeat", "tile", "unfold")


def is_view(node: fx.Node) -> bool:
    """True for an op whose result shares storage with its input, if need be: ``reshape`` and ``to`` may copy."""
    if mutated_inputs(node) or op_name(node) in _REINTERPRETS or node.target is torch.ops.aten.view.dtype:
        return False
    return any(aliased(node))


def is_view_or_copy(node: fx.Node) -> bool:
    """True for an op that gives elements of its input, in storage of either."""
    return op_name(node) in _COPIES or is_view(node)


def takes_any_layout(node: fx.Node) -> bool:
    """True for a view or copy that works whatever the strides of its input are."""
    return op_name(node) in _ANY_LAYOUT


def moves_each_once(node: fx.Node) -> bool:
    """True for a view or copy of one tensor, in its dtype, that shows no element twice.

    Its backward adds nothing up, which 16 bits would do with a larger error than float32.
    """
    if not is_view_or_copy(node) or op_name(node) in _REPEATS or not isinstance(value(node), torch.Tensor):
        return False
    return all(dtypes(source) == dtypes(node) for source in node.all_input_nodes[:1])
