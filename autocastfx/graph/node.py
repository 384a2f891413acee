"""Typed accessors for fx nodes: abstract values, arguments, origin marks and module paths; and runs, node by node."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.graph.names import op_name

# Operator schemas, read once and cached, because torch makes a schema's Python objects anew at each access.

_NUMBERS = ("Tensor", "number", "float")


@dataclass(frozen=True)
class Schema:
    """Names of an operator's arguments.

    Attributes:
        names: all of them, in order.
        numbers: those that take a tensor or a scalar; no sizes, dimensions or counts.
        written: those that the operator writes into.
        shared: those that an output may share storage with.
    """

    names: tuple[str, ...]
    numbers: frozenset[str]
    written: frozenset[str]
    shared: frozenset[str]


@lru_cache(maxsize=4096)
def schema(op: OpOverload) -> Schema:
    """Read the schema of ``op``."""
    said = op._schema
    arguments = said.arguments
    aliases = {a.name: a.alias_info for a in arguments if a.alias_info is not None}
    gives_alias = any(r.alias_info is not None for r in said.returns)
    return Schema(
        names=tuple(a.name for a in arguments),
        numbers=frozenset(a.name for a in arguments if _type(a.type) in _NUMBERS),
        written=frozenset(name for name, alias in aliases.items() if said.is_mutable and alias.is_write),
        shared=frozenset(aliases if gives_alias else ()),
    )


def _type(schema_type: object) -> str:
    return str(schema_type).replace("Optional[", "").rstrip("]")


# Turn symbolic sizes into numbers: their values for the example inputs, or their bounds.


def example(number: Any) -> Any:
    """Return the value of ``number`` for the example inputs if it is symbolic; None if it depends on data."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    node = number.node
    if node.hint is None:  # torch 2.11 has no hint for a symbol that it later found equal to an input's size
        expression = node.expr.xreplace(node.shape_env.backed_var_to_val)
        return None if expression.free_symbols else node.pytype(expression)
    return node.hint


def example_size(number: Any) -> Any:
    """Do as ``example``, but return 1 for a size that depends on data."""
    size = example(number)
    return 1 if size is None and isinstance(number, torch.SymInt) else size


def largest_size(number: Any) -> float:
    """Return the magnitude of ``number``, or the upper bound of a symbolic one; infinite if it is unbounded."""
    if not isinstance(number, torch.SymInt):
        return abs(float(number))
    bound = number.node.shape_env.bound_sympy(number.node.expr).upper
    return float(bound) if bound.is_finite else math.inf


def settled_size(number: Any) -> Any:
    """Return ``number`` itself: what is decided by a symbolic size becomes a condition of the graph's guard."""
    return number


# Keys of ``node.meta``: autocastfx's marks, and capture's abstract value. Only the accessors below use them.
_ORIGIN = "autocastfx_origin"
_STANDS_FOR = "autocastfx_stands_for"
_WRITES = "autocastfx_writes"
_VALUE = "val"
_CONTAINERS = (list, tuple, dict, slice)  # the only containers of arguments in which torch.fx looks for nodes


@dataclass(frozen=True)
class Origin:
    """The mark of a node that a pass created: the pass, the rule, and the value that the node stands for."""

    made_by: str
    rule: str
    value: str
    saturates: bool = False


def place_like(made: fx.Node, node: fx.Node) -> None:
    """Give ``made`` the module path and the source line of ``node``."""
    made.meta.update({key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta})


def origin(node: fx.Node) -> Origin | None:
    """Return the mark of a node that a pass created; None for a captured node."""
    return cast("Origin | None", node.meta.get(_ORIGIN))


def set_origin(node: fx.Node, mark: Origin) -> None:
    """Mark a node that a pass created."""
    node.meta[_ORIGIN] = mark


def stand_for(node: fx.Node, *names: str) -> None:
    """Note that ``node`` gives what other nodes gave, which are no longer there, or are in a sub-graph."""
    node.meta[_STANDS_FOR] = tuple(dict.fromkeys((*all_names(node)[1:], *names)))


def all_names(node: fx.Node) -> tuple[str, ...]:
    """Return the names under which a value is known: that of its node first, then those it stands for."""
    return node.name, *node.meta.get(_STANDS_FOR, ())


def note_writes(node: fx.Node, places: tuple[int, ...]) -> None:
    """Note at which of its positional arguments the graph that ``node`` runs writes into what it is given."""
    node.meta[_WRITES] = places


def written_inside(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the values into which the graph that ``node`` runs writes, as noted."""
    given = (node.args[place] for place in node.meta.get(_WRITES, ()))
    return tuple(one for one in given if isinstance(one, fx.Node))


def is_cast(node: fx.Node) -> bool:
    """True for a node that the conversion put in to bring a value to another precision."""
    mark = origin(node)
    return mark is not None and mark.made_by in ("rewrite", "follow", "store_weights")


def uncast(node: fx.Node) -> fx.Node:
    """Return the value behind the casts that the conversion put in."""
    while is_cast(node):
        node = node.all_input_nodes[-1]
    return node


def captured_behind(node: fx.Node) -> fx.Node:
    """Return the captured value that ``node`` is, or that passes made it of."""
    while origin(node) is not None:
        node = node.all_input_nodes[-1]
    return node


def kept_meta(node: fx.Node) -> dict[str, Any]:
    """Return the part of ``node.meta`` that pickles: the marks and the stack trace."""
    return {key: node.meta[key] for key in (_ORIGIN, _STANDS_FOR, _WRITES, "stack_trace") if key in node.meta}


def stack_trace(node: fx.Node) -> str:
    """Return the stack trace to the line of the model that made the node; empty if capture recorded none."""
    return str(node.meta.get("stack_trace") or "")


def value(node: fx.Node) -> Any:
    """Return the abstract value: a fake tensor, a symbolic number, a tuple or list of these, or None if unknown."""
    return node.meta.get(_VALUE)


def set_value(node: fx.Node, abstract: Any) -> None:
    """Replace the abstract value of a node."""
    node.meta[_VALUE] = abstract


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the abstract tensors that a node produces, flattened."""
    abstract = value(node)
    if isinstance(abstract, torch.Tensor):
        return (abstract,)
    return tuple(leaf for leaf in pytree.tree_leaves(abstract) if isinstance(leaf, torch.Tensor))


def dtypes(node: fx.Node) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors that a node produces, flattened."""
    return tuple(t.dtype for t in tensors(node))


def is_float32(node: fx.Node) -> bool:
    """True if the node's value is one float32 tensor, the only kind of value that a conversion casts."""
    abstract = value(node)
    return isinstance(abstract, torch.Tensor) and abstract.dtype == torch.float32


def has_float32(node: fx.Node) -> bool:
    """True if any tensor that the node produces is float32."""
    return torch.float32 in dtypes(node)


def elements(node: fx.Node, dtype: torch.dtype = torch.float32) -> int:
    """Count the elements of ``dtype`` that the node produces, for the sizes of the example inputs.

    A size that depends on data counts as 1.
    """
    return sum(math.prod(example_size(n) for n in t.shape) for t in tensors(node) if t.dtype == dtype)


@dataclass(frozen=True)
class Use:
    """A place where a node reads another: the argument's name (its position without a schema), and the node read."""

    argument: str
    node: fx.Node


def _named_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    names = schema(node.target).names if isinstance(node.target, OpOverload) else ()
    for i, arg in enumerate(node.args):
        yield names[i] if i < len(names) else str(i), arg
    yield from node.kwargs.items()


def uses(node: fx.Node) -> tuple[Use, ...]:
    """Return every place where ``node`` reads a node, in order; list arguments are flattened."""
    reads: list[Use] = []
    for name, arg in _named_arguments(node):
        if isinstance(arg, fx.Node):
            reads.append(Use(name, arg))
        elif isinstance(arg, _CONTAINERS):
            map_arg(arg, lambda n, name=name: reads.append(Use(name, n)))
    return tuple(reads)


def map_uses(node: fx.Node, change: Callable[[str, fx.Node], fx.Node]) -> None:
    """Replace each node that ``node`` reads by ``change(argument, read)``."""
    names = [name for name, _ in _named_arguments(node)]
    positional = names[: len(node.args)]
    node.args = tuple(
        map_arg(arg, lambda n, name=name: change(name, n)) for name, arg in zip(positional, node.args, strict=True)
    )
    node.kwargs = {name: map_arg(arg, lambda n, name=name: change(name, n)) for name, arg in node.kwargs.items()}


def constants(node: fx.Node) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a node has in place of tensors or as scalars; no sizes, dimensions or counts."""
    if not isinstance(node.target, OpOverload):
        return
    numbers = schema(node.target).numbers
    for name, arg in _named_arguments(node):
        if name in numbers and isinstance(arg, (int, float)) and not isinstance(arg, bool):
            yield name, float(arg)


def settings(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a node, by name, that are no value: neither nodes, nor lists of nodes, nor None."""
    for name, arg in _named_arguments(node):
        leaves = pytree.tree_leaves(arg)
        if arg is not None and not (leaves and all(leaf is None or isinstance(leaf, fx.Node) for leaf in leaves)):
            yield name, arg


def argument(node: fx.Node, name: str) -> Any:
    """Return the value given for the argument ``name``; None if none is."""
    return next((arg for given, arg in _named_arguments(node) if given == name), None)


def number(argument: Any) -> Any:
    """Return a number, or a symbolic size, that is given as it is or by a node; None for anything else and for NaN."""
    candidate = value(argument) if isinstance(argument, fx.Node) else argument
    is_number = isinstance(candidate, (int, float)) and not math.isnan(candidate)
    return candidate if is_number or isinstance(candidate, torch.SymInt) else None


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Set the argument ``name`` to ``value``: by position if it was given so, else by keyword."""
    positions = [given for given, _ in _named_arguments(node)][: len(node.args)]
    if name in positions:
        node.update_arg(positions.index(name), value)
    else:
        node.update_kwarg(name, value)


def is_member(node: fx.Node) -> bool:
    """True if the node only takes a member out of another node's tuple."""
    return node.op == "call_function" and op_name(node) == "getitem" and not is_float32(node.all_input_nodes[0])


def draws_random_numbers(node: fx.Node) -> bool:
    """True for an op that gives other values each time, by torch's tag."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def producer(node: fx.Node) -> fx.Node:
    """Return the node that computes a value: for a member of a tuple, the op that made the tuple."""
    while is_member(node):
        node = node.all_input_nodes[0]
    return node


def _module_stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Return (path, class) of the modules whose forward made the node, outermost first."""
    entries: Any = node.meta.get("nn_module_stack") or {}
    return tuple(
        (str(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for path, kind in entries.values()
    )


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that made the node; empty for the root."""
    stack = _module_stack(node)
    return stack[-1][0] if stack else ""


def enclosing_modules(node: fx.Node) -> tuple[str, ...]:
    """Return the paths of all modules around the node, outermost first, beginning with the root's empty path.

    Modules that only hold others (a ``ModuleList``) are included.
    """
    return tuple(dict.fromkeys(("", *(part for path, _ in _module_stack(node) for part in path_and_around(path)))))


def path_and_around(path: str) -> Iterator[str]:
    """Yield the paths of the root, of the modules around a module, and of the module itself."""
    yield ""
    yield from accumulate(path.split("."), "{}.{}".format) if path else ()


def module_classes(node: fx.Node) -> tuple[str, ...]:
    """Return the dotted paths of the classes of the modules around the node, innermost first."""
    return tuple(kind for _, kind in reversed(_module_stack(node)))


def subgraphs(node: fx.Node, attributes: Mapping[str, Any]) -> dict[str, fx.GraphModule]:
    """Return the graphs that a higher-order operator runs, by the ``get_attr`` target that it reads.

    ``attributes`` holds the values of the graph's ``get_attr`` nodes, except parameters and buffers.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return {}
    targets = (str(u.node.target) for u in uses(node) if u.node.op == "get_attr")
    return {t: attributes[t] for t in targets if isinstance(attributes.get(t), fx.GraphModule)}


def recomputed(node: fx.Node) -> dict[str, fx.GraphModule]:
    """Return the graph that a node of activation checkpointing runs, and again in backward, by the node's name."""
    module = getattr(node.target, "recomputed", None)
    return {node.name: module} if isinstance(module, fx.GraphModule) else {}


def attributes_of(module: torch.nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """All that ``graph`` reads of ``module``, by ``get_attr`` target."""
    return {str(n.target): attribute(module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}


def attribute(root: torch.nn.Module, path: str) -> Any:
    """Return the attribute that a ``get_attr`` node with target ``path`` reads."""
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, with the names and marks of its nodes."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {})).meta.update(graph.output_node().meta)
    return copied


Observer = Callable[[fx.Node, Any, Sequence[Any]], None]  # a node, the value that it gave, and those that it read


class NodeRun(fx.Interpreter):
    """Runs a graph node by node, and frees each value after its last use.

    Args:
        graph: of functions alone.
        given: gives what a ``get_attr`` node reads.
        observe: is called after each node. It may keep values, but not change them.
    """

    def __init__(self, graph: fx.Graph, given: Callable[[fx.Node], Any], observe: Observer | None = None) -> None:
        super().__init__(nn.Module(), graph=graph)
        self.extra_traceback = False
        self._given, self._observe = given, observe

    def run_node(self, n: fx.Node) -> Any:
        """Run ``n``, and show its value."""
        value = self._given(n) if n.op == "get_attr" else super().run_node(n)
        if self._observe is not None:
            self._observe(n, value, [self.env[read] for read in n.all_input_nodes])
        return value


# Tensors of a model among the inputs of a graph: torch.compile passes them in.

HELD = "autocastfx_held"  # in the meta of a graph's inputs
STORED = "autocastfx_stored"  # in the meta of a graph's output: the state that results become, by their numbers


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that the model holds, and that is an input of a graph of Dynamo's.

    Attributes:
        kind: ``"parameter"`` or ``"buffer"``.
        path: in the model, as far as it is known.
    """

    kind: str
    path: str

    @classmethod
    def of(cls, node: object) -> HeldTensor | None:
        """Return what an input of a graph holds; None for other inputs and nodes."""
        held = node.meta.get(HELD) if isinstance(node, fx.Node) else None
        return held if isinstance(held, HeldTensor) else None


# Lines of the model's code.


def place(filename: str, number: int) -> str:
    """Write a line of code as file, number and text."""
    line = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {line}" if line else f"{filename}:{number}"


def line_of(node: fx.Node) -> str:
    """Write the innermost line of the model that made a node; empty if capture recorded none."""
    found = re.findall(r'File "(.+)", line (\d+)', stack_trace(node))
    return place(found[-1][0], int(found[-1][1])) if found else ""
