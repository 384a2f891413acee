"""Find the tensors that follow from sizes and constants alone, and remove the masks among them that hide nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, handed_out, is_view_or_copy, mutated_inputs, seen_by_functions
from autocastfx.graph.magnitude import read_as_scores
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, draws_random_numbers, example, number, set_argument, tensors

# Tensors whose elements depend on their place alone: positions, and the masks that models make of them.

Shape = Sequence[Any]  # sizes, which may be symbolic


def _always(condition: Any) -> bool:
    """True if a condition on symbolic sizes holds whatever they are; asking makes it no condition of the graph."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


@dataclass(frozen=True)
class Affine:
    """A tensor with ``start + slopes[0]·i + slopes[1]·j + …`` at the place ``[i, j, …]``.

    Attributes:
        start: a number, or a symbolic size.
        slopes: one for each dimension.
    """

    start: Any
    slopes: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.slopes)

    def moved(self, change: Callable[[Affine], Affine]) -> Affine:
        """The same elements at other places."""
        return change(self)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """The sum with ``times`` another tensor of as many dimensions."""
        slopes = tuple(a + times * b for a, b in zip(self.slopes, other.slopes, strict=True))
        return Affine(self.start + times * other.start, slopes)

    def negative(self) -> Affine:
        """A tensor of whole numbers that is 0 or more where this one is below 0, and nowhere else."""
        return Affine(-1 - self.start, tuple(-slope for slope in self.slopes))

    def lowest(self, shape: Shape) -> Any:
        """The smallest element of a tensor of this shape."""
        return self.start + sum(slope * (size - 1) for slope, size in zip(self.slopes, shape, strict=True) if slope < 0)

    def is_at_least(self, bound: int, shape: Shape) -> bool:
        """True if no element of a tensor of this shape is below ``bound``, whatever the sizes are."""
        return _always(self.lowest(shape) >= bound)

    def simplified(self, shape: Shape) -> Affine:
        """The same tensor, of this shape, without slopes along single elements."""
        slopes = (0 if _always(size == 1) else slope for slope, size in zip(self.slopes, shape, strict=True))
        return Affine(self.start, tuple(slopes))


@dataclass(frozen=True)
class Choice:
    """A tensor of two numbers: ``yes`` where each of ``conditions`` is 0 or more, and ``no`` elsewhere."""

    conditions: tuple[Affine, ...]
    yes: float
    no: float

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.conditions[0].ndim

    def moved(self, change: Callable[[Affine], Affine]) -> Choice:
        """The same elements at other places."""
        return replace(self, conditions=tuple(map(change, self.conditions)))

    def where(self, holds: Callable[[float], bool]) -> tuple[Affine, ...] | None:
        """Conditions that are met where ``holds`` is true of the element, and nowhere else; None for no such."""
        if holds(self.yes) and not holds(self.no):
            return self.conditions
        if holds(self.no) and not holds(self.yes) and len(self.conditions) == 1:
            return (self.conditions[0].negative(),)
        return None

    def simplified(self, shape: Shape) -> Known:
        """The same tensor, of this shape, without conditions that are always met."""
        conditions = [condition.simplified(shape) for condition in self.conditions]
        conditions = [condition for condition in conditions if not condition.is_at_least(0, shape)]
        if not conditions:
            return everywhere(self.yes, len(shape))
        if any(condition.negative().is_at_least(0, shape) for condition in conditions):
            return everywhere(self.no, len(shape))
        return replace(self, conditions=tuple(conditions))


Known = Affine | Choice


def broadcast(known: Known, ndim: int) -> Known:
    """The same tensor, broadcast to ``ndim`` dimensions."""
    return known.moved(lambda affine: Affine(affine.start, (0,) * (ndim - affine.ndim) + affine.slopes))


def everywhere(number: Any, ndim: int) -> Affine:
    """A tensor of one number."""
    return Affine(number, (0,) * ndim)


def constant(known: Known | None) -> float | None:
    """The number that the tensor holds everywhere; None if it holds several, or is not known."""
    if isinstance(known, Affine) and not any(known.slopes) and isinstance(known.start, (int, float)):
        return known.start
    return None


def mapped(change: Callable[[float, float], float], a: Known, b: Known) -> Known | None:
    """``change`` of each element of ``a`` and of ``b``, of which one at least is a constant; None for others."""
    left, right = constant(a), constant(b)
    if left is not None and right is not None:
        return everywhere(change(left, right), a.ndim)
    if isinstance(a, Choice) and right is not None:
        return replace(a, yes=change(a.yes, right), no=change(a.no, right))
    if isinstance(b, Choice) and left is not None:
        return replace(b, yes=change(left, b.yes), no=change(left, b.no))
    return None


def all_of(a: Known, b: Known) -> Known | None:
    """1 where both are, 0 elsewhere, of tensors of 0 and 1 that are not 0 everywhere; None if that is not known."""
    one, other = (() if constant(k) == 1 else k.where(bool) if isinstance(k, Choice) else None for k in (a, b))
    if one is None or other is None:
        return None
    return Choice((*one, *other), 1, 0) if one or other else everywhere(1, a.ndim)


# Where the elements of a view's source stand in the view.

_SAME_PLACES = ("clone", "contiguous", "detach", "lift_fresh_copy", "to")
_RESHAPES = ("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view")

# For each dimension of the source: the dimension that it becomes, if any, where it begins, and its step.
_Places = Sequence[tuple[int | None, Any, int]]


def seen_through(node: fx.Node, operand: Known) -> Known | None:
    """The result of the view, copy or cast ``node`` of the tensor ``operand``; None if it is not known."""
    before, after = tensors(node.all_input_nodes[0])[0], tensors(node)[0]
    places = _places(node, before, after)
    return None if places is None else operand.moved(lambda affine: _placed(affine, places, after.ndim))


def _placed(operand: Affine, places: _Places, ndim: int) -> Affine:
    start, slopes = operand.start, [0] * ndim
    for slope, (dim, first, step) in zip(operand.slopes, places, strict=True):
        start = start + slope * first if slope else start
        if dim is not None:
            slopes[dim] = slope * step
    return Affine(start, tuple(slopes))


def _places(node: fx.Node, before: torch.Tensor, after: torch.Tensor) -> _Places | None:
    name, dims = op_name(node), list(range(before.ndim))
    if name in _SAME_PLACES:
        return [(dim, 0, 1) for dim in dims]
    if name in ("broadcast_to", "expand", "expand_as"):
        return [(dim + after.ndim - before.ndim, 0, 1) for dim in dims]
    if name in ("slice", "select"):
        return _cut(node, name, dims)
    if name in ("transpose", "t", "mT", "permute"):
        order = _order(node, name, dims)
        return [(order.index(dim), 0, 1) for dim in dims]
    return _paired(before, after) if name in _RESHAPES else None


def _order(node: fx.Node, name: str, dims: list[int]) -> list[int]:
    if name == "permute":
        return [dim % len(dims) for dim in argument(node, "dims")]
    if len(dims) < 2:
        return dims
    pair = (argument(node, "dim0"), argument(node, "dim1")) if name == "transpose" else (-2, -1)
    a, b = (dim % len(dims) for dim in pair)
    return [{a: b, b: a}.get(dim, dim) for dim in dims]


def _cut(node: fx.Node, name: str, dims: list[int]) -> _Places | None:
    is_select, cut = name == "select", (argument(node, "dim") or 0) % len(dims)
    first = number(argument(node, "index" if is_select else "start") or 0)
    step = 1 if is_select else argument(node, "step") or 1
    if first is None or not isinstance(step, int) or not Affine(first, ()).is_at_least(0, ()):
        return None
    gone: int | None = None if is_select else cut
    return [(gone, first, step) if dim == cut else (dim - (is_select and dim > cut), 0, 1) for dim in dims]


def _paired(before: torch.Tensor, after: torch.Tensor) -> _Places | None:
    """Where a view adds and takes out dimensions of one element alone."""
    sources, results = ([d for d, size in enumerate(t.shape) if not _always(size == 1)] for t in (before, after))
    become = dict(zip(sources, results, strict=False))
    is_paired = len(sources) == len(results)
    if not is_paired or not all(_always(before.shape[a] == after.shape[b]) for a, b in become.items()):
        return None
    return [(become.get(dim), 0, 1) for dim in range(before.ndim)]


# Find the tensors that a captured graph computes from sizes and constants alone.

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

_KnownNodes = Mapping[fx.Node, Known]


def known_values(graph: fx.Graph, written: Set[fx.Node]) -> dict[fx.Node, Known]:
    """Find the tensors of ``graph`` whose elements are known before any input is.

    Args:
        graph: captured, with abstract values.
        written: values left out, because their storage is, or may be, written to.
    """
    known: dict[fx.Node, Known] = {}
    for node in graph.nodes:
        if node.op == "call_function" and len(tensors(node)) == 1 and node not in written:
            tensor, result = tensors(node)[0], _made(node) or _moved(node, known) or _computed(node, known)
            result = result.simplified(tensor.shape) if result is not None else None
            if result is not None and _has(tensor.dtype, result):
                known[node] = result
    return known


def of_operand(operand: Any, known: _KnownNodes, ndim: int = 0) -> Known | None:
    """A known tensor or a number, broadcast to ``ndim`` dimensions if it has fewer; None if it is not known."""
    if isinstance(operand, fx.Node) and tensors(operand):
        return broadcast(known[operand], ndim) if operand in known else None
    scalar = number(operand)
    return None if scalar is None else everywhere(scalar, ndim)


def _has(dtype: torch.dtype, known: Known) -> bool:
    """True if ``dtype`` can hold these numbers without rounding, wrapping or conversion to bool."""
    if isinstance(known, Affine) and (any(known.slopes) or isinstance(known.start, torch.SymInt)):
        return dtype in _INTEGERS
    numbers = (known.yes, known.no) if isinstance(known, Choice) else (known.start,)
    if dtype == torch.bool:
        return all(element in (0, 1) for element in numbers)
    if dtype.is_floating_point:
        return all(torch.tensor(element, dtype=torch.float64).to(dtype).item() == element for element in numbers)
    return dtype in _INTEGERS and all(abs(element) < _LARGEST and float(element).is_integer() for element in numbers)


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


def _moved(node: fx.Node, known: _KnownNodes) -> Known | None:
    """Of a view, a copy or a cast."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in known or not is_view_or_copy(node):
        return None
    before, after = tensors(source)[0], tensors(node)[0]
    if constant(known[source]) is not None and before.dtype == after.dtype:
        return everywhere(constant(known[source]), after.ndim)
    return seen_through(node, known[source]) if op_name(node) == "to" or before.dtype == after.dtype else None


def _computed(node: fx.Node, known: _KnownNodes) -> Known | None:
    name, ndim = op_name(node), tensors(node)[0].ndim
    if name in _OF_ONE:
        operand = known.get(node.all_input_nodes[0])
        return _OF_ONE[name](node, operand, known) if operand is not None else None
    if node.kwargs or not all(isinstance(a, (fx.Node, int, float)) for a in node.args):
        return None
    operands = [of_operand(a, known, ndim) for a in node.args]
    is_bool = tensors(node)[0].dtype == torch.bool
    if name in ("where", "masked_fill") and len(operands) == 3:
        return _picked(*operands) if name == "where" else _picked(operands[1], operands[2], operands[0])
    if name in _NOTS and is_bool and operands[0] is not None:
        return mapped(lambda a, _: int(not a), operands[0], everywhere(0, ndim))
    if name in ANDS and is_bool and any(constant(operand) == 0 for operand in operands):
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
    if not isinstance(mask, Choice) or a is None or b is None:
        return None
    return replace(mask, yes=a if mask.yes else b, no=a if mask.no else b)


def _of_two(node: fx.Node, name: str, a: Known, b: Known) -> Known | None:
    a, b, name = (b, a, "sub") if name == "rsub" else (a, b, name)
    result = mapped(lambda x, y: _OF_TWO[name](x, y) * 1, a, b)
    if result is not None or not isinstance(a, Affine) or not isinstance(b, Affine):
        return result
    if name in (*SUMS, "mul"):
        return _added(name, a, b) if tensors(node)[0].dtype in _INTEGERS else None
    above, below = a.plus(b, -1), b.plus(a, -1)
    if name in ("eq", "ne"):
        apart = constant(above)
        return None if apart is None else everywhere(int(_OF_TWO[name](apart, 0)), a.ndim)
    holds = {"ge": above, "lt": above.negative(), "le": below, "gt": below.negative()}.get(name)
    return Choice((holds,), 1, 0) if holds is not None else None


def _added(name: str, a: Affine, b: Affine) -> Affine | None:
    if name != "mul":
        return a.plus(b, 1 if name == "add" else -1)
    times, of = (constant(b), a) if constant(b) is not None else (constant(a), b)
    return everywhere(0, of.ndim).plus(of, times) if isinstance(times, int) else None


# ---- ops of one tensor ----------------------------------------------------------------------------------------------


def _triangle(node: fx.Node, operand: Known, known: _KnownNodes) -> Known | None:
    filled, above = constant(operand), number(argument(node, "diagonal") or 0)
    if filled is None or above is None:
        return None
    before = (0,) * (operand.ndim - 2)
    is_lower = op_name(node) == "tril"
    return Choice((Affine(above, (*before, 1, -1)) if is_lower else Affine(-above, (*before, -1, 1)),), filled, 0)


def _summed(node: fx.Node, operand: Known, known: _KnownNodes) -> Known | None:
    filled = constant(operand)
    if not isinstance(filled, int) or not operand.ndim:
        return None
    along = argument(node, "dim") % operand.ndim
    return Affine(filled, tuple(filled if dim == along else 0 for dim in range(operand.ndim)))


def _differences(node: fx.Node, operand: Known, known: _KnownNodes) -> Known | None:
    """Of neighbours, where all are the same; the first may have one element that stands before it."""
    before, dim = argument(node, "prepend"), argument(node, "dim")
    if argument(node, "n") not in (None, 1) or argument(node, "append") is not None or not isinstance(operand, Affine):
        return None
    along = (-1 if dim is None else dim) % operand.ndim
    step = operand.slopes[along]
    if before is not None:
        first = of_operand(before, known, operand.ndim)
        if not isinstance(first, Affine) or tensors(before)[0].shape[along] != 1:
            return None
        apart = operand.plus(first, -1)
        others = [slope for at, slope in enumerate(apart.slopes) if at != along]
        if any(others) or not isinstance(apart.start, int) or apart.start != step:
            return None
    return everywhere(step, operand.ndim)


def _indexed(node: fx.Node, operand: Known, known: _KnownNodes) -> Known | None:
    """Where all dimensions are indexed, by tensors of places."""
    ndim, indices = tensors(node)[0].ndim, argument(node, "indices")
    index_places = [(index, known.get(index)) for index in indices]
    places = [
        broadcast(place, ndim)
        for index, place in index_places
        if isinstance(place, Affine)
        and tensors(index)[0].dtype in _INTEGERS
        and place.is_at_least(0, tensors(index)[0].shape)
    ]
    if len(places) != operand.ndim or len(places) != len(indices):
        return None

    def composed(of: Affine) -> Affine:
        total = everywhere(of.start, ndim)
        for slope, place in zip(of.slopes, places, strict=True):
            total = total.plus(place, slope) if isinstance(place, Affine) else total
        return total

    return operand.moved(composed)


_OF_ONE: dict[str, Callable[[fx.Node, Known, _KnownNodes], Known | None]] = {
    **{"cumsum": _summed, "diff": _differences, "index": _indexed},
    **dict.fromkeys(("tril", "triu"), _triangle),
}


# Remove masks that are known whatever the inputs, and the ops that they make needless.
#
# In a graph models build attention masks even if nothing is hidden, from ones, zeros and comparisons of
# positions with 0. Such a mask is one number everywhere, and adding it changes nothing. They build causal masks from
# comparisons of positions with each other, for torch refuses ``is_causal`` there; but a fused kernel that takes
# ``is_causal`` is faster than one that takes a mask, and flash attention takes none.


def drop_settled(graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
    """Remove nodes that change nothing whatever the inputs, in place.

    These are ``and`` with True, the addition of zeros (which may change the sign of a zero), attention masks that hide
    nothing or what comes later alone, and the nodes that only these read. float32 zeros that would widen a 16-bit value
    are a sum's first value, and stay, except where they are added to scores. Values that share storage which is, or may
    be, written to are kept, and so are outputs, which must not become inputs.

    Args:
        graph: captured, with abstract values.
        attributes: the values of its ``get_attr`` nodes, parameters and buffers apart.
    """
    shared = alias_sets(graph).keys() | seen_by_functions(graph, attributes)
    known, outputs = known_values(graph, shared), handed_out(graph)
    dropped: list[fx.Node] = []
    for node in list(graph.nodes):
        source = _source(node, known, shared)
        if source is not None and not {node, source} & shared and node not in outputs:
            dropped += [node, *node.all_input_nodes]
            node.replace_all_uses_with(source)
        elif op_name(node) == "scaled_dot_product_attention":
            dropped += _unmasked(node, known)
    _erase_unread(graph, [*dropped, *known])


def _source(node: fx.Node, known: Mapping[fx.Node, Known], written: Set[fx.Node]) -> fx.Node | None:
    """Return the input that ``node`` returns unchanged, or None."""
    name = op_name(node)
    if name not in (*ANDS, *SUMS) or node.kwargs or len(node.args) != 2:
        return None
    neutral = 1 if name in ANDS else 0
    sides = [node.args] if name == "sub" else [node.args, node.args[::-1]]
    for kept, other in sides:
        if isinstance(kept, fx.Node) and constant(of_operand(other, known)) == neutral and _stands_for(kept, node):
            is_bits = name in ANDS and tensors(node)[0].dtype != torch.bool  # 1 is one bit of many
            is_start = name in SUMS and _widens(other, node) and not read_as_scores(node, written)
            return None if is_bits or is_start else kept
    return None


def _widens(zeros: Any, total: fx.Node) -> bool:
    """True if ``total`` is float32 because ``zeros`` are, by torch's promotion: a number widens no dimensions."""
    zero_tensors = tensors(zeros) if isinstance(zeros, fx.Node) else ()
    return any(t.dtype == torch.float32 and (t.ndim > 0 or tensors(total)[0].ndim == 0) for t in zero_tensors)


def _stands_for(kept: fx.Node, node: fx.Node) -> bool:
    """True if ``kept`` can replace ``node``: dtype, device, sizes and strides are the same."""
    a, b = tensors(kept), tensors(node)
    if len(a) != 1 or len(b) != 1 or (a[0].dtype, a[0].device, a[0].ndim) != (b[0].dtype, b[0].device, b[0].ndim):
        return False
    pairs = [*zip(a[0].shape, b[0].shape, strict=True), *zip(a[0].stride(), b[0].stride(), strict=True)]
    return all(_always(m == n) for m, n in pairs)


# ---- attention ------------------------------------------------------------------------------------------------------


def _unmasked(node: fx.Node, known: Mapping[fx.Node, Known]) -> list[fx.Node]:
    """Take the mask from an attention where it hides nothing, or what comes later alone; gives what was taken."""
    mask = argument(node, "attn_mask")
    if not isinstance(mask, fx.Node) or mask not in known:
        return []
    hides = _hides(known[mask], tensors(mask)[0])
    if hides is None or (hides and not _is_causal(hides, tensors(mask)[0])):
        return []
    set_argument(node, "attn_mask", None)
    if hides:
        set_argument(node, "is_causal", True)
    return [mask]


def _hides(known: Known, mask: torch.Tensor) -> tuple[Affine, ...] | None:
    """Conditions under which a mask shows a score, all others being hidden; None if it does something else."""

    def shows(element: float) -> bool:
        return bool(element) is (mask.dtype == torch.bool)

    everywhere = constant(known)
    if everywhere is not None:
        return () if shows(everywhere) else None
    if not isinstance(known, Choice):
        return None
    hidden = known.no if shows(known.yes) else known.yes
    is_lost = mask.dtype == torch.bool or hidden <= torch.finfo(mask.dtype).min
    return known.where(shows) if is_lost else None


def _is_causal(shown: tuple[Affine, ...], mask: torch.Tensor) -> bool:
    """True if query ``i`` sees the keys up to ``i``, counted from the first ones: what ``is_causal`` means in torch.

    What else a mask may hide, beyond a window, has no effect up to a length: then the graph is for such lengths.
    """
    others = [condition.lowest(mask.shape) >= 0 for condition in shown if not _is_diagonal(condition)]
    if len(others) == len(shown) or not all(map(example, others)):
        return False
    return all(map(bool, others))  # the graph's guard has them from here on


def _is_diagonal(condition: Affine) -> bool:
    *before, row, column = condition.slopes
    return not any(before) and (row, column) == (1, -1) and isinstance(condition.start, int) and condition.start == 0


def _erase_unread(graph: fx.Graph, candidates: list[fx.Node]) -> None:
    """Erase the ``candidates`` that no node reads, and then the nodes that only they read."""
    due = set(candidates)
    for node in reversed(graph.nodes):
        is_needed = node.users or mutated_inputs(node) or draws_random_numbers(node)
        if node in due and node.op == "call_function" and not is_needed:
            due.update(node.all_input_nodes)
            graph.erase_node(node)
