"""Clean up the graph of an exported program for the passes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autocastfx.capture.flatten_transforms import flatten_transforms
from autocastfx.capture.whole_calls import LEAF, restore_leaves
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import all_names, argument, attribute, dtypes, stand_for, subgraphs, value
from autocastfx.graph.walk import values_given

__all__ = ["no_op_source", "tidy"]

_END = 2**63 - 1  # where torch ends a slice without an end


def tidy(
    module: fx.GraphModule,
    names: set[str],
    called: list[Any],
    attributes: dict[str, Any],
    inputs: Sequence[str] = (),
    *,
    follows: bool = False,
) -> fx.Graph:
    """Copy an exported graph, with inputs first and attributes read where they are used.

    Assertions and nodes that change nothing are dropped; with ``follows``, ``type_as`` stays. ``inputs`` names the
    placeholders. Attributes that are not in ``names``, the model's tensors, are added to ``attributes``.
    """
    module = flatten_transforms(module)
    restore_leaves(module.graph, called)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = sorted(module.graph.nodes, key=lambda n: n.op != "placeholder")
    input_names = iter(inputs)

    def copy(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        if node.op == "get_attr":
            held, target = str(node.target), str(node.target).removeprefix("module.")
            if target not in names:
                target = held if target in attributes else target
                attributes[target] = _attribute(attribute(module, held), called, follows)
            copied = graph.create_node("get_attr", target, name=target.replace(".", "_"))
        elif node.op == "placeholder":
            name = next(input_names, None) or _as_argument(re.sub(r"^[a-z]_(module_)?", "", node.name))
            copied = graph.create_node("placeholder", name, name=name)
        elif callable(node.target) and node.name.startswith(LEAF.name()):
            args, kwargs = map_arg((node.args, node.kwargs), copy)
            name = of_function(node.target).rpartition(".")[2]
            copied = graph.create_node("call_function", node.target, args, kwargs, name=name)
        else:
            copied = graph.node_copy(node, copy)
        copied.meta.update(node.meta)
        _clean_stack(copied)
        copies[node] = copied
        return copied

    for node in nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], copy))
        elif node.op == "call_module" and node.target == "_guards_fn":
            continue
        elif node.op != "get_attr" and not _is_assertion(node):
            source = no_op_source(node, follows=follows)
            copies[node] = copy(node if source is None else source)
            if source is not None:
                stand_for(copies[node], node.name)
    _name_members(graph, attributes)
    return graph


def _name_members(graph: fx.Graph, attributes: dict[str, Any]) -> None:
    """Note which value of a region each member of what it gives is: ``region/name``."""
    for node in graph.nodes:
        for target, module in subgraphs(node, attributes).items():
            output = module.graph.output_node().args[0]
            given = output if isinstance(output, (tuple, list)) else ()
            outside = values_given(node, module.graph)
            for user in (user for user in node.users if op_name(user) == "getitem" and user.args[1] < len(given)):
                member = given[user.args[1]]
                if isinstance(member, fx.Node):
                    through = outside.get(member)
                    inner, *others = all_names(member)
                    own = (f"{target}/{inner}",) if through is None else all_names(through)
                    stand_for(user, *own, *(f"{target}/{name}" for name in others))


def _as_argument(name: str) -> str:
    """Return a name that generated code can give an argument: that of a tensor in module ``0`` begins with a digit."""
    return name if name.isidentifier() else f"_{name}"


def _attribute(held: Any, called: list[Any], follows: bool) -> Any:
    if not isinstance(held, fx.GraphModule):
        return held.detach() if isinstance(held, torch.Tensor) else held
    inner: dict[str, Any] = {}
    graph = tidy(held, set(), called, inner, follows=follows)
    return fx.GraphModule(inner, graph)


def _is_assertion(node: fx.Node) -> bool:
    return op_name(node) == "_assert_tensor_metadata"  # bakes the captured dtype and device


def no_op_source(node: fx.Node, *, follows: bool = False) -> fx.Node | None:
    """Return the input of a node that changes nothing.

    It is an alias, a slice of everything, dropout in evaluation, ``type_as`` of equal dtypes, or the detaching of a
    constant's copy (``torch.tensor``), which has no history.
    """
    name = op_name(node)
    if (
        name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
        and argument(node, "train") is False
    ):
        return node.all_input_nodes[0]
    if node.target is torch.ops.aten.detach_.default and op_name(node.all_input_nodes[0]) == "lift_fresh_copy":
        return node.all_input_nodes[0]
    if name == "alias" or (name == "slice" and _takes_all(node)):
        return node.all_input_nodes[0]
    if (
        name == "type_as"
        and not follows
        and dtypes(node.all_input_nodes[0]) == dtypes(node)
        and value(node) is not None
    ):
        return node.all_input_nodes[0]
    return None


def _takes_all(node: fx.Node) -> bool:
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= _END)) and step in (None, 1)


def _clean_stack(node: fx.Node) -> None:
    """Remove the wrapper's name from module paths."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    inner = {
        key: (path.removeprefix("module").removeprefix("."), kind)
        for key, (path, kind) in stack.items()
        if path and path != "_empty_nn_module_stack_from_metadata_hook"  # torch's own stand-in
    }
    if stack:
        node.meta["nn_module_stack"] = inner
