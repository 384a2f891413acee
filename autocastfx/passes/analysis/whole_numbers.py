"""Float32 values that are whole numbers: positions, counts, masks, indices. Rounded, some of them become equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import argument, constants, largest_size, tensors, uses
from autocastfx.graph.product import Size, product
from autocastfx.policy.kernel_facts import KernelFacts
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category

__all__ = ["WholeNumbers", "holds_one_number", "largest_whole", "told_apart"]


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
        held: Mapping[str, float],
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
            held: largest magnitudes of buffers and constants that hold whole numbers alone, by ``get_attr`` target.
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
            rule = op_list.rule(op_name(node)) if node.op == "call_function" else None
            category = rule.category if rule is not None else None
            own = _reach(node, reach, category, facts, size)
            if node.op == "get_attr" and node not in written:
                own = held.get(str(node.target))
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
    found = _computed(node, known, category, facts, size) if node.op == "call_function" else None
    return math.inf if found is None and not made[0].is_floating_point() else found


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
        return max(map(largest_size, ends), default=math.inf) if all(map(_is_whole, ends)) else None
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
    is_product = category is Category.ALLOW and name in facts.reduces
    contracted = product(node, facts.reduces[name], size) if is_product else None
    return _times(*whole, contracted.depth) if contracted is not None else None


def _times(*bounds: float) -> float:
    """Their product, in which 0 times anything is 0."""
    return 0.0 if 0.0 in bounds else math.prod(bounds)


def _is_whole(number: Any) -> bool:
    return isinstance(number, torch.SymInt) or (math.isfinite(number) and float(number).is_integer())
