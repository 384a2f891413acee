"""Numbers that 16 bits do not tell apart, and what is known of the numbers that a model holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autocastfx.graph.alias import alias_sets, reachable
from autocastfx.graph.magnitude import Magnitude, is_here, magnitude
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import argument, constants, example, has_float32, largest_size, tensors, uses
from autocastfx.graph.sizes import Size, product
from autocastfx.passes.analysis.units import listed_category, only_moves
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category

# Float32 values that are whole numbers: positions, counts, masks, indices. Rounded, some of them become equal.


def told_apart(low: torch.dtype) -> int:
    """Up to which number ``low`` holds every whole number: 256 for bfloat16, 2,048 for float16."""
    return round(2 / torch.finfo(low).eps)


def largest_whole(tensor: torch.Tensor) -> float | None:
    """Largest magnitude in ``tensor`` if it holds whole numbers alone, else None."""
    if tensor.is_complex() or not tensor.numel():
        return None
    if tensor.is_floating_point() and not bool((tensor == tensor.round()).all()):
        return None
    return float(tensor.abs().max()) if tensor.dtype != torch.bool else 1.0


def holds_one_number(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` holds one number, or 0 and one number: a mask."""
    if tensor.is_complex() or not tensor.numel():
        return False
    number = tensor.flatten()[tensor.abs().argmax()] if tensor.dtype != torch.bool else tensor.any()
    return bool(((tensor == 0) | (tensor == number)).all())


@dataclass(frozen=True)
class WholeNumbers:
    """The whole numbers of one graph.

    Attributes:
        reach: largest magnitude that each value of whole numbers may have; infinite where nothing tells.
        scaled: values computed, element by element, from whole numbers that 16 bits do not tell apart: positions times
            a slope, say.
        hiding: values that a number beyond those makes a mask: whatever it is rounded to, it hides the scores that it
            is added to.
    """

    reach: Mapping[fx.Node, float]
    scaled: frozenset[fx.Node]
    hiding: frozenset[fx.Node] = frozenset()

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        whole: Mapping[str, float],
        masks: Set[str],
        measured: Mapping[fx.Node, float],
        op_list: OpList,
        facts: KernelFacts,
        low: torch.dtype,
        size: Size = largest_size,
    ) -> WholeNumbers:
        """The whole numbers of ``graph``.

        Args:
            graph: captured, with abstract values.
            whole: largest magnitudes of buffers and constants that hold whole numbers alone, by ``get_attr`` target.
            masks: those of them that hold one number, or 0 and one number.
            measured: largest magnitudes of outputs on calibration data.
            op_list: names the ops that only move values.
            facts: which ops give whole numbers, and how they grow.
            low: the 16-bit dtype.
            size: the most that a size may be; None where sizes are unknown.
        """
        reach: dict[fx.Node, float] = {}
        scaled: set[fx.Node] = set()
        hiding: set[fx.Node] = set()
        written = alias_sets(graph).keys()  # what these hold now, they do not hold later
        for node in graph.nodes:
            category = listed_category(node, op_list)
            own = _reach(node, reach, category, facts, size)
            if node.op == "get_attr" and node not in written:
                own = whole.get(str(node.target))
            values = (n for n in node.all_input_nodes if tensors(n))  # a size is none
            blurred = [n for n in values if n in scaled or reach.get(n, 0) > told_apart(low)]
            if own is not None:
                reach[node] = min(own, measured.get(node, math.inf))
            elif category in (Category.INFER, Category.CLEAR) and blurred:
                scaled.add(node)
            if node.op == "get_attr" and str(node.target) in masks:
                hiding.add(node)
            elif node.op == "call_function":
                kind = facts.whole_numbers.get(base_name(op_name(node)))
                if _is_hiding(node, hiding, scaled, blurred, category, kind, told_apart(low)):
                    hiding.add(node)
        return cls(reach, frozenset(scaled), frozenset(hiding))

    def are_positions(self, mask: fx.Node, most: int) -> bool:
        """True if ``mask``, which is added to scores, holds numbers that 16 bits do not tell apart, and hides none."""
        return (mask in self.scaled or self.reach.get(mask, 0.0) > most) and mask not in self.hiding


def _is_hiding(
    node: fx.Node,
    hiding: Set[fx.Node],
    scaled: Set[fx.Node],
    blurred: Sequence[fx.Node],
    category: Category | None,
    kind: str | None,
    most: int,
) -> bool:
    """True if all that makes the values of ``node`` large is a number written there, or into what it reads."""
    is_written = any(abs(number) > most for _, number in constants(node))
    if is_written and kind in ("multiplied", "filled"):
        return True
    if is_written and category is Category.CLEAR:
        return not any(read in scaled and read not in hiding for read in node.all_input_nodes)
    is_elementwise = category in (Category.INFER, Category.CLEAR) or kind == "moved"
    return is_elementwise and set(blurred) <= hiding and not hiding.isdisjoint(node.all_input_nodes)


def _reach(
    node: fx.Node, known: Mapping[fx.Node, float], category: Category | None, facts: KernelFacts, size: Size
) -> float | None:
    """Return a bound on the whole numbers that ``node`` gives; None if it may give others."""
    made = tensors(node)[:1]
    if not made or made[0].is_complex() or node.op == "output":
        return None
    if made[0].dtype == torch.bool:
        return 1.0
    bound = _computed(node, known, category, facts, size) if node.op == "call_function" else None
    return math.inf if bound is None and not made[0].is_floating_point() else bound


def _computed(
    node: fx.Node, known: Mapping[fx.Node, float], category: Category | None, facts: KernelFacts, size: Size
) -> float | None:
    name = base_name(op_name(node))
    kind = facts.whole_numbers.get(name, "moved" if category is Category.CLEAR else "")
    if kind == "made":
        return math.inf
    if kind == "truth":
        return 1.0
    if kind in ("counted", "filled"):
        ends = [n for n in node.args if isinstance(n, (int, float, torch.SymInt))]
        if not all(map(_is_whole, ends)):
            return None
        if kind == "counted" and any(isinstance(end, int) and _is_of_size(node.graph, end) for end in ends):
            return math.inf
        return max(map(largest_size, ends), default=math.inf)
    floating = tensors(node)[0].is_floating_point()
    operands = [u.node for u in uses(node) if tensors(u.node)]
    if kind == "moved":  # an index or a mask says which values, and is none of them
        operands = [read for read in operands if tensors(read)[0].is_floating_point() is floating] or operands
    numbers = [number for _, number in constants(node)]
    bounds = [known.get(read) for read in operands] + [abs(n) if _is_whole(n) else None for n in numbers]
    whole = [bound for bound in bounds if bound is not None]
    if len(whole) < len(bounds) or not bounds:
        return None
    if kind == "bounded" and len(numbers) == 2:
        return max(map(abs, numbers))
    if kind in ("moved", "bounded"):
        return max(whole)
    if kind == "added":
        return sum(whole) * max(1.0, abs(argument(node, "alpha") or 1))
    if kind == "multiplied":
        return _times(*whole)
    if kind == "summed":
        sizes = map(size, tensors(operands[0])[0].shape)
        return _times(whole[0], *(math.inf if n is None else n for n in sizes))
    is_product = category is not None and category.is_low and name in facts.reduces
    contracted = product(node, facts.reduces[name], size) if is_product else None
    return _times(*whole, contracted.depth) if contracted is not None else None


def _is_of_size(graph: fx.Graph, end: int) -> bool:
    """True if ``end`` seems to be made of a size of the call, which a graph for one call has as a number."""
    inputs = (one for node in graph.find_nodes(op="placeholder") for one in tensors(node))
    sizes = {int(size) for one in inputs for size in one.shape if isinstance(size, int)}
    return any(end in (size - 1, size, size + 1, 2 * size - 1, 2 * size) for size in sizes if end > 1)


def _times(*bounds: float) -> float:
    """Their product, in which 0 times anything is 0."""
    return 0.0 if 0.0 in bounds else math.prod(bounds)


def _is_whole(number: Any) -> bool:
    return isinstance(number, torch.SymInt) or (math.isfinite(number) and float(number).is_integer())


# Facts about the numbers that parameters, buffers and constants hold when a model is converted.


@dataclass(frozen=True)
class HeldValues:
    """Tensors by ``get_attr`` target, as far as they have values here.

    Attributes:
        magnitudes: how large the elements of each float32 tensor are.
        fixed_scalars: tensors of one element that no optimizer changes.
        whole: largest magnitude of each buffer and constant that holds whole numbers alone.
        masks: buffers and constants of one number, or of 0 and one number.
        trained: parameters that require gradients.
        balanced: tensors that are not trained, and whose rows each add up to zero.
        averaging: tensors that are not trained, and whose rows each add up to one.
    """

    magnitudes: Mapping[str, Magnitude]
    fixed_scalars: frozenset[str]
    whole: Mapping[str, float]
    masks: frozenset[str]
    trained: frozenset[str]
    balanced: frozenset[str]
    averaging: frozenset[str]

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> HeldValues:
        """The facts of all tensors among ``attributes``, which may also hold graphs of sub-graphs."""
        tensors = {n: t for n, t in attributes.items() if isinstance(t, torch.Tensor)}
        reached = {n: magnitude(t) for n, t in tensors.items()}
        fixed = {n: t for n, t in tensors.items() if not isinstance(t, nn.Parameter) and is_here(t)}
        whole = {n: largest_whole(t) for n, t in fixed.items()}
        trained = {n for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        weights = {n: t for n, t in tensors.items() if n not in trained and is_here(t)}
        return cls(
            magnitudes={n: measured.magnitude() for n, measured in reached.items() if measured is not None},
            fixed_scalars=frozenset(n for n, t in tensors.items() if t.numel() == 1 and n not in trained),
            whole={n: number for n, number in whole.items() if number is not None},
            masks=frozenset(n for n, t in fixed.items() if holds_one_number(t)),
            trained=frozenset(trained),
            balanced=frozenset(n for n, t in weights.items() if _rows_add_up_to(0.0, t)),
            averaging=frozenset(n for n, t in weights.items() if _rows_add_up_to(1.0, t)),
        )

    @cached_property
    def largest(self) -> dict[str, float]:
        """Largest finite magnitude of each float32 tensor."""
        return {name: measured.largest for name, measured in self.magnitudes.items()}


def fixed_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what decisions may rest on as long as the numbers of a tensor stay; nothing for other tensors.

    That is its number, if it has one alone; whether it holds whole numbers, and up to which; whether it is a mask, or
    the weights of a stencil or an average.
    """
    if not is_here(tensor) or not (tensor.is_floating_point() or tensor.numel() == 1):
        return ()
    number = tensor.item() if tensor.numel() == 1 else None
    whole, rows = largest_whole(tensor), [_rows_add_up_to(total, tensor) for total in (0.0, 1.0)]
    is_mask = holds_one_number(tensor)
    return (number, whole, is_mask, *rows) if number is not None or whole is not None or is_mask or any(rows) else ()


def _rows_add_up_to(total: float, tensor: torch.Tensor) -> bool:
    """True for the weights of a stencil (zero), or of an average (one)."""
    if tensor.ndim < 2 or tensor.numel() <= tensor.shape[0] or tensor.dtype != torch.float32:
        return False
    rows = tensor.detach().flatten(1).double()
    sizes = rows.abs().sum(1)
    return bool((((rows.sum(1) - total).abs() <= 1e-6 * sizes) & (sizes > 0)).all())


def cast_once(attributes: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The tensors that torch.autocast casts to 16 bits once a region: float32 leaves that require gradients."""
    own = {n: t for n, t in attributes.items() if t.dtype == torch.float32 and t.requires_grad and t.is_leaf}
    return {name: id(tensor) for name, tensor in own.items()}


# Distances written as a² + b² - 2ab: a small difference of large sums, of which one is a matrix product.

_SUMS = ("add", "sub", "rsub", "addmm", "baddbmm")
SCALES = ("mul", "div", "neg")


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
    products: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes if squares else ():
        name = base_name(op_name(node)) if node.op == "call_function" else ""
        if name not in _SUMS:
            continue
        terms = set(_terms(node, op_list))
        sums = {square for square in squares.values() for t in terms if _adds_up(t, square)}
        for term in terms:
            near = [square for u in uses(term) if (square := squares.get(_origin(u.node, op_list))) in sums]
            if near and allowed.get(term):
                products.setdefault(term, near[0])
    return products


def is_second_power(node: fx.Node) -> bool:
    """True for ``square``, and for ``pow`` with the exponent 2."""
    name = base_name(op_name(node))
    return name == "square" or (name == "pow" and argument(node, "exponent") == 2)


def _is_square(node: fx.Node, facts: KernelFacts, size: Size) -> bool:
    if node.op != "call_function" or not has_float32(node):
        return False
    name = base_name(op_name(node))
    if is_second_power(node):
        return True
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
        if name in _SUMS or (name in SCALES and len(reads) == 1) or only_moves(term, op_list):
            yield from (r for r in reads if name[-2:] != "mm" or r is argument(term, "self"))

    yield from reachable([node], added)


def _adds_up(term: fx.Node, square: fx.Node) -> bool:
    """True if ``term`` is the sum of ``square``, or the square itself."""
    return term is square or (term.op == "call_function" and square in term.all_input_nodes)


def _origin(value: fx.Node, op_list: OpList) -> fx.Node:
    """The value that ``value`` shows or scales, through views and products with a number."""
    while value.op == "call_function":
        reads = [u.node for u in uses(value) if has_float32(u.node)]
        if len(reads) != 1 or not (base_name(op_name(value)) in SCALES or only_moves(value, op_list)):
            break
        value = reads[0]
    return value
