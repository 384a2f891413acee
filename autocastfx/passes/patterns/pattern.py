"""Patterns: formulas of several ops that one operator computes, and the search for them in a captured graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.fx.proxy import GraphAppendingTracer

from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import is_float32

__all__ = ["Arguments", "Formula", "Found", "Pattern"]

_TOLERANCE = 1e-6  # relative, of the numbers in a formula: models round sqrt(2/pi) to seven digits and more
_COMMUTES = ("add", "mul")

Formula = Callable[..., Any]
Found = Mapping[str, Any]  # what stands for each parameter of a formula: a node, or a number, or a list of dimensions
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Bound = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Pattern:
    """A function that models write out.

    Attributes:
        name: under which ``convert(recompose=...)`` chooses it.
        formulas: the ways in which it is written. Operands may stand in either order where that changes nothing.
        target: the operator that computes the same.
        arguments: of the operator, for what stands for the parameters of a formula; None where it does not compute the
            same of these.
        numbers: those parameters that stand for what is written into the graph, and not for a value.
        owns_casts: whether a cast of an input to float32 belongs to the function: norms are defined in float32.
        own_layout: whether the operator lays its result out in its own way, and not as the formula does.
        needs_range: whether it computes the same only in a dtype of float32's range. A row of scores that are masked
            whole gives equal weights where each is lost in finfo.min, and others where a smaller number stands for it.
        finite: those parameters that must be made in the graph, of finite numbers.
        by_default: whether ``recompose=True`` asks for it.
    """

    name: str
    formulas: tuple[Formula, ...]
    target: OpOverload
    arguments: Callable[[Found], Arguments | None]
    numbers: frozenset[str] = frozenset()
    owns_casts: bool = False
    own_layout: bool = False
    needs_range: bool = False
    finite: frozenset[str] = frozenset()
    by_default: bool = True

    @property
    def op(self) -> str:
        """The op name of ``target``."""
        return of_function(self.target)

    @cached_property
    def _results(self) -> Mapping[str, tuple[fx.Node, ...]]:
        """The last node of each formula's graph, by its op name."""
        results = [_graph(formula) for formula in self.formulas]
        return {op: tuple(r for r in results if op_name(r) == op) for op in {op_name(r) for r in results}}

    def occurrences(self, node: fx.Node) -> Iterator[tuple[Found, Arguments]]:
        """Yield the parameters' values and the operator's arguments, for each way to read ``node`` as a formula."""
        for result in self._results.get(op_name(node), ()):
            for bound in self._matches(result, node, {}):
                found = {str(known.target): held for known, held in bound.items()}
                arguments = self.arguments(found)
                if arguments is not None:
                    yield found, arguments

    def may_be_in(self, ops: frozenset[str]) -> bool:
        """True if a graph of these ops can hold a formula of the pattern."""
        return any(formula <= ops for formula in self._ops)

    @cached_property
    def _ops(self) -> tuple[frozenset[str], ...]:
        """The ops of each formula."""
        results = (result for same in self._results.values() for result in same)
        return tuple(frozenset(op_name(node) for node in _inner(result.graph)) for result in results)

    def _matches(self, known: Any, found: Any, bound: Bound) -> Iterator[Bound]:
        """Every way to read ``found``, an argument in a captured graph, as ``known``, one in a formula's graph."""
        if not isinstance(known, fx.Node):
            if _is_same(known, found):
                yield bound
        elif known.op == "placeholder":
            held = [found] if known.target in self.numbers else self._values(found)
            if known in bound:
                yield from (bound for one in held if _is_same(bound[known], one))
            else:
                yield from ({**bound, known: one} for one in held)
        elif isinstance(found, fx.Node):
            found = _behind_casts(found)
            if op_name(known) == op_name(found) and known.kwargs.keys() == found.kwargs.keys():
                rest = list(known.kwargs.values()), [found.kwargs[key] for key in known.kwargs]
                orders = (known.args, known.args[::-1]) if op_name(known) in _COMMUTES else (known.args,)
                for args in orders if len(known.args) == len(found.args) else ():
                    yield from self._all_match((*args, *rest[0]), (*found.args, *rest[1]), bound)

    def _all_match(self, known: Sequence[Any], found: Sequence[Any], bound: Bound) -> Iterator[Bound]:
        if not known:
            yield bound
            return
        for first in self._matches(known[0], found[0], bound):
            yield from self._all_match(known[1:], found[1:], first)

    def _values(self, found: Any) -> list[fx.Node]:
        """The values that may stand for a parameter: what is read, and what the model's casts to float32 read there."""
        if not isinstance(found, fx.Node):
            return []
        values = [found]
        while op_name(values[-1]) == "to" and is_float32(values[-1].all_input_nodes[0]):
            values.append(values[-1].all_input_nodes[0])
        return values[::-1] if self.owns_casts else values


def _graph(formula: Formula) -> fx.Node:
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    parameters = inspect.signature(formula).parameters
    result: fx.Proxy = formula(*(fx.Proxy(graph.placeholder(name), tracer) for name in parameters))
    return result.node


def _inner(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op in ("call_function", "call_method"))


def _is_same(known: Any, found: Any) -> bool:
    if isinstance(known, (list, tuple)):
        return isinstance(found, (list, tuple)) and list(known) == list(found)
    if isinstance(known, bool) or isinstance(found, bool):
        return known is found
    if isinstance(known, (int, float)):
        return isinstance(found, (int, float)) and math.isclose(found, known, rel_tol=_TOLERANCE)
    return bool(known == found)


def _behind_casts(node: fx.Node) -> fx.Node:
    """Return the value before the model's own casts, which belong to the formula that they stand in."""
    while op_name(node) == "to" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
