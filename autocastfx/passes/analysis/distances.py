"""Distances written as a² + b² - 2ab: a small difference of large sums, of which one is a matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from autocastfx.graph.alias import reachable
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import argument, example, has_float32, uses
from autocastfx.graph.product import Size, product
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category

__all__ = ["distance_products"]

_SUMS = ("add", "sub", "rsub", "addmm", "baddbmm")
_SCALES = ("mul", "div", "neg")
_POWERS = ("pow", "square")


def distance_products(
    graph: fx.Graph, allowed: Mapping[fx.Node, bool], op_list: OpList, facts: KernelFacts, size: Size = example
) -> dict[fx.Node, fx.Node]:
    """The products that are added to the squares of one of their own operands, each with such a square.

    Args:
        graph: captured, with abstract values.
        allowed: for every computing node, whether it is a product that a list allows in 16 bits.
        op_list: names the ops that only move values.
        facts: which ops are squares.
        size: a number for a size; None where sizes are unknown.
    """
    squares: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if _is_square(node, facts, size):
            squares.setdefault(_origin(next(u.node for u in uses(node) if has_float32(u.node)), op_list), node)
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes if squares else ():
        name = base_name(op_name(node)) if node.op == "call_function" else ""
        if name not in _SUMS:
            continue
        terms = set(_terms(node, op_list))
        sums = {square for square in squares.values() for t in terms if _adds_up(t, square)}
        for term in terms:
            near = [square for u in uses(term) if (square := squares.get(_origin(u.node, op_list))) in sums]
            if near and allowed.get(term):
                found.setdefault(term, near[0])
    return found


def _is_square(node: fx.Node, facts: KernelFacts, size: Size) -> bool:
    if node.op != "call_function" or not has_float32(node):
        return False
    name = base_name(op_name(node))
    if name in _POWERS:
        return name == "square" or argument(node, "exponent") == 2
    reads = [u.node for u in uses(node)]
    if len(reads) != 2 or reads[0] is not reads[1]:
        return False
    sizes = product(node, facts.reduces[name], size) if name in facts.reduces else None
    return name in facts.same_operands or (sizes is not None and sizes.is_sum)


def _terms(node: fx.Node, op_list: OpList) -> Iterator[fx.Node]:
    """The terms of a sum, followed through further sums, numbers that multiply, and views."""

    def added(term: fx.Node) -> Iterator[fx.Node]:
        name = base_name(op_name(term)) if term.op == "call_function" else ""
        reads = [u.node for u in uses(term) if has_float32(u.node)]
        if name in _SUMS or (name in _SCALES and len(reads) == 1) or _moves(term, op_list):
            yield from (r for r in reads if name[-2:] != "mm" or r is argument(term, "self"))

    yield from reachable([node], added)


def _adds_up(term: fx.Node, square: fx.Node) -> bool:
    """True if ``term`` is the sum of ``square``, or the square itself."""
    return term is square or (term.op == "call_function" and square in term.all_input_nodes)


def _moves(node: fx.Node, op_list: OpList) -> bool:
    rule = op_list.rule(op_name(node)) if node.op == "call_function" else None
    return rule is not None and rule.category is Category.CLEAR


def _origin(value: fx.Node, op_list: OpList) -> fx.Node:
    """The value that ``value`` shows or scales, through views and products with a number."""
    while value.op == "call_function":
        reads = [u.node for u in uses(value) if has_float32(u.node)]
        if len(reads) != 1 or not (base_name(op_name(value)) in _SCALES or _moves(value, op_list)):
            break
        value = reads[0]
    return value
