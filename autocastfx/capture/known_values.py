"""Find the tensors that a captured graph computes from sizes and constants alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autocastfx.capture.affine import Affine, Chosen, Known, all_of, broadcast, constant, everywhere, mapped
from autocastfx.capture.view_places import seen_through
from autocastfx.graph.alias import is_view_or_copy
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, number, tensors

__all__ = ["ANDS", "SUMS", "known_values", "of_operand"]

ANDS = ("__and__", "bitwise_and", "logical_and")
SUMS = ("add", "sub")

_FILLED = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
_FULL = {"full": "fill_value", "new_full": "fill_value", "full_like": "fill_value", "scalar_tensor": "s"}
_NOTS = ("bitwise_not", "logical_not")
_INTEGERS = (torch.int64, torch.int32)
_LARGEST = 2**31
_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul},
    **{"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt},
    **{"eq": operator.eq, "ne": operator.ne},
}

_Found = Mapping[fx.Node, Known]


def known_values(graph: fx.Graph, written: Set[fx.Node]) -> dict[fx.Node, Known]:
    """Find the tensors of ``graph`` whose elements are known before any input is.

    Args:
        graph: captured, with abstract values.
        written: values left out, because their storage is, or may be, written to.
    """
    known: dict[fx.Node, Known] = {}
    for node in graph.nodes:
        if node.op == "call_function" and len(tensors(node)) == 1 and node not in written:
            tensor, found = tensors(node)[0], _made(node) or _moved(node, known) or _computed(node, known)
            found = found.simplified(tensor.shape) if found is not None else None
            if found is not None and _has(tensor.dtype, found):
                known[node] = found
    return known


def of_operand(operand: Any, known: _Found, ndim: int = 0) -> Known | None:
    """A known tensor or a number, broadcast to ``ndim`` dimensions if it has fewer; None if it is not known."""
    if isinstance(operand, fx.Node) and tensors(operand):
        return broadcast(known[operand], ndim) if operand in known else None
    found = number(operand)
    return None if found is None else everywhere(found, ndim)


def _has(dtype: torch.dtype, known: Known) -> bool:
    """True if ``dtype`` can hold these numbers without rounding, wrapping or conversion to bool."""
    if isinstance(known, Affine) and (any(known.slopes) or isinstance(known.start, torch.SymInt)):
        return dtype in _INTEGERS
    numbers = (known.yes, known.no) if isinstance(known, Chosen) else (known.start,)
    if dtype == torch.bool:
        return all(held in (0, 1) for held in numbers)
    if dtype.is_floating_point:
        return all(torch.tensor(held, dtype=torch.float64).to(dtype).item() == held for held in numbers)
    return dtype in _INTEGERS and all(abs(held) < _LARGEST and float(held).is_integer() for held in numbers)


def _made(node: fx.Node) -> Known | None:
    """Of a tensor made of nothing."""
    name, ndim = op_name(node), tensors(node)[0].ndim
    if name in _FILLED:
        return everywhere(_FILLED[name], ndim)
    if name in _FULL:
        filled = number(argument(node, _FULL[name]))
        return None if filled is None else everywhere(filled, ndim)
    if name == "arange":
        is_short = str(getattr(node.target, "_overloadname", "")) == "default"
        start, step = (0, 1) if is_short else (number(node.args[0]), number((*node.args, 1)[2]))
        return Affine(start, (step,)) if isinstance(start, (int, torch.SymInt)) and isinstance(step, int) else None
    return None


def _moved(node: fx.Node, known: _Found) -> Known | None:
    """Of a view, a copy or a cast."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in known or not is_view_or_copy(node):
        return None
    before, after = tensors(source)[0], tensors(node)[0]
    if constant(known[source]) is not None and before.dtype == after.dtype:
        return everywhere(constant(known[source]), after.ndim)
    return seen_through(node, known[source]) if op_name(node) == "to" or before.dtype == after.dtype else None


def _computed(node: fx.Node, known: _Found) -> Known | None:
    name, ndim = op_name(node), tensors(node)[0].ndim
    if name in _OF_ONE:
        held = known.get(node.all_input_nodes[0])
        return _OF_ONE[name](node, held, known) if held is not None else None
    if node.kwargs or not all(isinstance(a, (fx.Node, int, float)) for a in node.args):
        return None
    operands = [of_operand(a, known, ndim) for a in node.args]
    is_bool = tensors(node)[0].dtype == torch.bool
    if name in ("where", "masked_fill") and len(operands) == 3:
        return _picked(*operands) if name == "where" else _picked(operands[1], operands[2], operands[0])
    if name in _NOTS and is_bool and operands[0] is not None:
        return mapped(lambda a, _: int(not a), operands[0], everywhere(0, ndim))
    if name in ANDS and is_bool and any(constant(held) == 0 for held in operands):
        return everywhere(0, ndim)
    a, b = operands if len(operands) == 2 else (None, None)
    if a is None or b is None:
        return None
    if name in ANDS:
        return all_of(a, b) if is_bool else None
    return _of_two(node, name, a, b) if name in (*_OF_TWO, "rsub") else None


def _picked(mask: Known | None, yes: Known | None, no: Known | None) -> Known | None:
    if mask is None or constant(mask) is not None:
        return None if mask is None else yes if constant(mask) else no
    a, b = constant(yes), constant(no)
    if not isinstance(mask, Chosen) or a is None or b is None:
        return None
    return replace(mask, yes=a if mask.yes else b, no=a if mask.no else b)


def _of_two(node: fx.Node, name: str, a: Known, b: Known) -> Known | None:
    a, b, name = (b, a, "sub") if name == "rsub" else (a, b, name)
    found = mapped(lambda x, y: _OF_TWO[name](x, y) * 1, a, b)
    if found is not None or not isinstance(a, Affine) or not isinstance(b, Affine):
        return found
    if name in (*SUMS, "mul"):
        return _added(name, a, b) if tensors(node)[0].dtype in _INTEGERS else None
    above, below = a.plus(b, -1), b.plus(a, -1)
    if name in ("eq", "ne"):
        apart = constant(above)
        return None if apart is None else everywhere(int(_OF_TWO[name](apart, 0)), a.ndim)
    holds = {"ge": above, "lt": above.negative(), "le": below, "gt": below.negative()}.get(name)
    return Chosen((holds,), 1, 0) if holds is not None else None


def _added(name: str, a: Affine, b: Affine) -> Affine | None:
    if name != "mul":
        return a.plus(b, 1 if name == "add" else -1)
    times, of = (constant(b), a) if constant(b) is not None else (constant(a), b)
    return everywhere(0, of.ndim).plus(of, times) if isinstance(times, int) else None


# ---- ops of one tensor ----------------------------------------------------------------------------------------------


def _triangle(node: fx.Node, held: Known, known: _Found) -> Known | None:
    filled, above = constant(held), number(argument(node, "diagonal") or 0)
    if filled is None or above is None:
        return None
    before = (0,) * (held.ndim - 2)
    is_lower = op_name(node) == "tril"
    return Chosen((Affine(above, (*before, 1, -1)) if is_lower else Affine(-above, (*before, -1, 1)),), filled, 0)


def _summed(node: fx.Node, held: Known, known: _Found) -> Known | None:
    filled = constant(held)
    if not isinstance(filled, int) or not held.ndim:
        return None
    along = argument(node, "dim") % held.ndim
    return Affine(filled, tuple(filled if dim == along else 0 for dim in range(held.ndim)))


def _differences(node: fx.Node, held: Known, known: _Found) -> Known | None:
    """Of neighbours, where all are the same; the first may have one element that stands before it."""
    before, dim = argument(node, "prepend"), argument(node, "dim")
    if argument(node, "n") not in (None, 1) or argument(node, "append") is not None or not isinstance(held, Affine):
        return None
    along = (-1 if dim is None else dim) % held.ndim
    step = held.slopes[along]
    if before is not None:
        first = of_operand(before, known, held.ndim)
        if not isinstance(first, Affine) or tensors(before)[0].shape[along] != 1:
            return None
        apart = held.plus(first, -1)
        others = [slope for at, slope in enumerate(apart.slopes) if at != along]
        if any(others) or not isinstance(apart.start, int) or apart.start != step:
            return None
    return everywhere(step, held.ndim)


def _indexed(node: fx.Node, held: Known, known: _Found) -> Known | None:
    """Where all dimensions are indexed, by tensors of places."""
    ndim, indices = tensors(node)[0].ndim, argument(node, "indices")
    found = [(index, known.get(index)) for index in indices]
    places = [
        broadcast(place, ndim)
        for index, place in found
        if isinstance(place, Affine)
        and tensors(index)[0].dtype in _INTEGERS
        and place.is_at_least(0, tensors(index)[0].shape)
    ]
    if len(places) != held.ndim or len(places) != len(indices):
        return None

    def composed(of: Affine) -> Affine:
        total = everywhere(of.start, ndim)
        for slope, place in zip(of.slopes, places, strict=True):
            total = total.plus(place, slope) if isinstance(place, Affine) else total
        return total

    return held.at(composed)


_OF_ONE: dict[str, Callable[[fx.Node, Known, _Found], Known | None]] = {
    **{"cumsum": _summed, "diff": _differences, "index": _indexed},
    **dict.fromkeys(("tril", "triu"), _triangle),
}
