"""What models write out in several ops and one operator computes: patterns as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autocastfx.op_name import of_function, op_name

__all__ = ["PATTERNS", "Pattern", "chosen"]

_TOLERANCE = 1e-6  # relative, of the numbers in a formula: models round sqrt(2/pi) to seven digits and more
_COMMUTES = ("add", "mul")

Formula = Callable[[Any], Any]
Bound = Mapping[fx.Node, fx.Node]


@dataclass(frozen=True)
class Pattern:
    """A function of one tensor that models write out.

    Attributes:
        name: under which ``convert(recompose=...)`` chooses it.
        formulas: the ways in which it is written. Operands may stand in either order where that changes nothing.
        target: the operator that computes the same of the same tensor.
        kwargs: its further arguments.
    """

    name: str
    formulas: tuple[Formula, ...]
    target: OpOverload
    kwargs: Mapping[str, Any]

    @property
    def op(self) -> str:
        """The op name of ``target``."""
        return of_function(self.target)

    @cached_property
    def _results(self) -> tuple[fx.Node, ...]:
        """The last node of each formula's graph."""
        return tuple(_graph(formula) for formula in self.formulas)

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The value of which ``node`` is this function, once for each formula that says so."""
        for result in self._results:
            for bound in _matches(result, node, {}):
                yield next(found for known, found in bound.items() if known.op == "placeholder")

    def may_be_in(self, ops: frozenset[str]) -> bool:
        """Whether a graph of these ops can hold any formula."""
        return any({op_name(n) for n in _inner(result.graph)} <= ops for result in self._results)


def _graph(formula: Formula) -> fx.Node:
    graph = fx.Graph()
    result: fx.Proxy = formula(fx.Proxy(graph.placeholder("x")))
    return result.node


def _inner(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def _matches(known: Any, found: Any, bound: Bound) -> Iterator[Bound]:
    """Every way to read ``found``, an argument in a captured graph, as ``known``, one in a formula's graph."""
    if not isinstance(known, fx.Node):
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if is_number and math.isclose(found, known, rel_tol=_TOLERANCE):
            yield bound
    elif not isinstance(found, fx.Node):
        return
    elif known in bound:
        if bound[known] is found:
            yield bound
    elif known.op == "placeholder":
        yield {**bound, known: found}
    else:
        found = _behind_casts(found)
        if op_name(known) == op_name(found) and len(known.args) == len(found.args) and not found.kwargs:
            orders = (known.args, known.args[::-1]) if op_name(known) in _COMMUTES else (known.args,)
            for args in orders:
                yield from _all_match(args, found.args, bound)


def _all_match(known: Sequence[Any], found: Sequence[Any], bound: Bound) -> Iterator[Bound]:
    if not known:
        yield bound
        return
    for first in _matches(known[0], found[0], bound):
        yield from _all_match(known[1:], found[1:], first)


def _behind_casts(node: fx.Node) -> fx.Node:
    """What the model's own casts were applied to; they belong to the formula that they stand in."""
    while op_name(node) == "to" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _tanh_gelu() -> Iterator[Formula]:
    scale, cube = math.sqrt(2 / math.pi), 0.044715
    inner: tuple[Formula, ...] = (
        lambda x: scale * (x + cube * x**3),
        lambda x: scale * (x + cube * (x * x * x)),
        lambda x: scale * (x + cube * x * x * x),
        lambda x: scale * (x + cube * (x * x) * x),
        lambda x: x * scale * (1 + cube * x * x),
        lambda x: x * scale * (1 + cube * (x * x)),
        lambda x: x * scale * (1 + cube * x**2),
    )
    outer: tuple[Callable[[Any, Any], Any], ...] = (
        lambda x, t: 0.5 * x * (1 + t),
        lambda x, t: 0.5 * (x * (1 + t)),
        lambda x, t: x * (0.5 * (1 + t)),
    )
    for whole in outer:
        for part in inner:
            yield lambda x, whole=whole, part=part: whole(x, torch.tanh(part(x)))


PATTERNS = (Pattern("tanh_gelu", tuple(_tanh_gelu()), torch.ops.aten.gelu.default, {"approximate": "tanh"}),)


def chosen(recompose: bool | Sequence[str]) -> tuple[str, ...]:
    """The names of the patterns that ``convert``'s argument asks for.

    Raises:
        ValueError: there is no pattern of a name, or the argument is no such choice.
    """
    known = tuple(pattern.name for pattern in PATTERNS)
    if isinstance(recompose, bool):
        return known if recompose else ()
    if isinstance(recompose, str):
        raise ValueError(f"recompose is True, False or a sequence of names: give ({recompose!r},), not {recompose!r}")
    if unknown := [name for name in recompose if name not in known]:
        raise ValueError(f"recompose: there is no pattern {unknown[0]!r}; the patterns are {', '.join(known)}")
    return tuple(name for name in known if name in recompose)
