"""Walk the computing nodes of a graph and of its sub-graphs, under their names in a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autocastfx.graph.alias import aliased
from autocastfx.graph.names import op_name
from autocastfx.graph.node import all_names, attributes_of, module_path, recomputed, subgraphs

# Higher-order operators whose graphs are converted too; values that enter or leave them keep their captured dtype.
# Others stay whole: an autocast region has its own policy, and a region that switches autocast off asks for float32.
_CONVERTED_INSIDE = ("wrap_with_set_grad_enabled", "cond", "while_loop", "map_impl", "scan")


def walk(
    graph: fx.Graph,
    attributes: Mapping[str, Any],
    prefix: str = "",
    outer: Mapping[fx.Node, fx.Node] | None = None,
) -> Iterator[Located]:
    """Yield the computing nodes in order; a node that runs sub-graphs is replaced by the nodes of these.

    Args:
        graph: captured or converted.
        attributes: values of its ``get_attr`` nodes, except parameters and buffers.
        prefix: prefix of the names.
        outer: for a sub-graph, the outside node for each of its inputs.
    """
    outer = outer or {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inner = converted_inside(node, attributes)
        if not inner:
            yield Located(prefix + node.name, node, outer)
        for target, module in inner.items():
            inner_attributes = attributes_of(module, module.graph)
            sources = {**outer, **values_given(node, module.graph)}
            yield from walk(module.graph, inner_attributes, f"{prefix}{target.rpartition('.')[2]}/", sources)


@dataclass(frozen=True)
class Located:
    """A computing node with its name in the plan; ``outer`` maps inputs of its sub-graph to nodes outside of it."""

    name: str
    node: fx.Node
    outer: Mapping[fx.Node, fx.Node]

    def stored_as(self, read: fx.Node) -> str:
        """Return the path of the parameter or buffer that ``read`` is or views; empty for a computed value."""
        while (source := self._behind(read)) is not None:
            read = source
        return str(read.target) if read.op == "get_attr" else ""

    def _behind(self, read: fx.Node) -> fx.Node | None:
        if read.op != "call_function":
            return self.outer.get(read)
        shared = tuple(dict.fromkeys(aliased(read)))
        return shared[0] if len(shared) == 1 else None


def converted_inside(node: fx.Node, attributes: Mapping[str, Any]) -> dict[str, fx.GraphModule]:
    """The sub-graphs that ``node`` runs and a conversion goes into, by ``get_attr`` target.

    ``attributes`` holds what the graph's ``get_attr`` nodes read, parameters and buffers apart.
    """
    return subgraphs(node, attributes) if is_converted_inside(node) else {}


def is_converted_inside(node: fx.Node) -> bool:
    """True for an operator that runs sub-graphs which a conversion goes into."""
    return op_name(node) in _CONVERTED_INSIDE


def values_given(node: fx.Node, inside: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the values that ``node`` gives a sub-graph that it runs, by the inputs of the sub-graph."""
    inputs = [n for n in inside.nodes if n.op == "placeholder"]
    pairs = zip(inputs, node.args[-len(inputs) :] if inputs else (), strict=False)
    return {placeholder: value for placeholder, value in pairs if isinstance(value, fx.Node)}


def names_stood_for(graph: fx.Graph, attributes: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of nodes that others stand for, in ``graph`` and in its sub-graphs that are converted.

    Args:
        graph: captured or converted.
        attributes: values of its ``get_attr`` nodes, except parameters and buffers.
        prefix: prefix of the names.
    """
    for node in graph.nodes:
        yield from (prefix + name for name in all_names(node)[1:])
        for target, module in (converted_inside(node, attributes) | recomputed(node)).items():
            inside = f"{prefix}{target.rpartition('.')[2]}/"
            yield from names_stood_for(module.graph, attributes_of(module, module.graph), inside)


def all_nodes(graph: fx.Graph, attributes: Mapping[str, Any]) -> Iterator[fx.Node]:
    """The computing nodes of ``graph`` and of every graph that it runs, converted or not."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            yield node
            for module in (subgraphs(node, attributes) | recomputed(node)).values():
                yield from all_nodes(module.graph, attributes_of(module, module.graph))


# Find a node again in another capture of the same model.

MODES = ("train", "eval")
Key = tuple[str, str, str]  # name of the node, its op, the path of its module


def key_of(node: fx.Node, prefix: str = "") -> Key:
    """Return a key that finds the node in another capture of the same model. ``prefix`` names its sub-graph."""
    return prefix + node.name, op_name(node), module_path(node)


def mode_of(training: Iterable[bool]) -> str:
    """Return ``"train"`` if any of the modules' training flags is set, else ``"eval"``."""
    return MODES[0] if any(training) else MODES[1]
