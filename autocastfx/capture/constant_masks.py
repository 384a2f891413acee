"""Remove masks that are constant whatever the inputs, and the ops that they make needless.

Under torch.export models build attention masks even if nothing is hidden, from ones, zeros and comparisons of positions
with 0. Such a mask is one number everywhere, and adding it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, handed_out, mutated_inputs, seen_by_functions
from autocastfx.graph.node import argument, draws_random_numbers, set_argument, tensors
from autocastfx.graph.op_name import op_name
from autocastfx.graph.view_ops import is_view_or_copy

__all__ = ["drop_settled"]

Bounds = tuple[float, float]  # the smallest and the largest possible element

_MADE_OF: dict[str, float] = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
_COMPARISONS: dict[str, Callable[[Bounds, Bounds], bool | None]] = {
    "ge": lambda a, b: _known(a[0] >= b[1], a[1] < b[0]),
    "gt": lambda a, b: _known(a[0] > b[1], a[1] <= b[0]),
    "le": lambda a, b: _known(a[1] <= b[0], a[0] > b[1]),
    "lt": lambda a, b: _known(a[1] < b[0], a[0] >= b[1]),
}
_ANDS = ("__and__", "bitwise_and", "logical_and")
_SUMS = ("add", "sub")


def _known(holds: bool, fails: bool) -> bool | None:
    return True if holds else False if fails else None


def drop_settled(graph: fx.Graph) -> None:
    """Remove nodes that change nothing whatever the inputs, in place.

    These are ``and`` with True, the addition of zeros (which may change the sign of a zero), attention masks that hide
    nothing, and the nodes that only these read. Values that share storage which is, or may be, written to are kept, and
    so are outputs, which must not become inputs.
    """
    shared = alias_sets(graph).keys() | seen_by_functions(graph)
    known, outputs = _bounds(graph, shared), handed_out(graph)
    dropped: list[fx.Node] = []
    for node in list(graph.nodes):
        source = _source(node, known)
        if source is not None and not {node, source} & shared and node not in outputs:
            dropped += [node, *node.all_input_nodes]
            node.replace_all_uses_with(source)
        elif op_name(node) == "scaled_dot_product_attention" and _hides_nothing(argument(node, "attn_mask"), known):
            dropped.append(argument(node, "attn_mask"))
            set_argument(node, "attn_mask", None)
    _erase_unread(graph, [*dropped, *known])


def _source(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> fx.Node | None:
    """Return the input that ``node`` returns unchanged, or None."""
    name = op_name(node)
    if name not in (*_ANDS, *_SUMS) or node.kwargs or len(node.args) != 2:
        return None
    neutral = (1, 1) if name in _ANDS else (0, 0)
    sides = [node.args] if name == "sub" else [node.args, node.args[::-1]]
    for kept, other in sides:
        if isinstance(kept, fx.Node) and _of(other, known) == neutral and _stands_for(kept, node):
            is_bits = name in _ANDS and tensors(node)[0].dtype != torch.bool  # 1 is one bit of many
            return None if is_bits else kept
    return None


def _stands_for(kept: fx.Node, node: fx.Node) -> bool:
    """True if ``kept`` can replace ``node``: dtype, device, sizes and strides are the same."""
    a, b = tensors(kept), tensors(node)
    if len(a) != 1 or len(b) != 1 or (a[0].dtype, a[0].device, a[0].ndim) != (b[0].dtype, b[0].device, b[0].ndim):
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    pairs = [*zip(a[0].shape, b[0].shape, strict=True), *zip(a[0].stride(), b[0].stride(), strict=True)]
    return all(statically_known_true(m == n) for m, n in pairs)


def _hides_nothing(mask: Any, known: Mapping[fx.Node, Bounds]) -> bool:
    if not isinstance(mask, fx.Node) or mask not in known:
        return False
    return known[mask] == ((1, 1) if tensors(mask)[0].dtype == torch.bool else (0, 0))


def _of(operand: Any, known: Mapping[fx.Node, Bounds]) -> Bounds | None:
    if isinstance(operand, fx.Node):
        return known.get(operand)
    return (operand, operand) if isinstance(operand, (int, float)) and not math.isnan(operand) else None


def _bounds(graph: fx.Graph, written: Set[fx.Node]) -> dict[fx.Node, Bounds]:
    """Return the bounds of values that are computed without inputs, parameters and constant tensors, if known."""
    known: dict[fx.Node, Bounds] = {}
    for node in graph.nodes:
        if node.op == "call_function" and len(tensors(node)) == 1 and node not in written:
            found = _computed(node, known)
            if found is not None and _has(tensors(node)[0].dtype, found):
                known[node] = found
    return known


def _has(dtype: torch.dtype, bounds: Bounds) -> bool:
    """True if ``dtype`` can hold numbers within these bounds without rounding, wrapping or conversion to bool."""
    if dtype == torch.bool:
        return bounds in ((0, 0), (1, 1))
    is_whole = all(math.isinf(bound) or float(bound).is_integer() for bound in bounds)
    return is_whole and (dtype.is_floating_point or dtype in (torch.int64, torch.int32))


def _computed(node: fx.Node, known: Mapping[fx.Node, Bounds]) -> Bounds | None:
    name, args = op_name(node), node.args
    if name in _MADE_OF:
        return _MADE_OF[name], _MADE_OF[name]
    if name == "arange":
        return _range(node)
    if name in ("full", "new_full", "full_like", "scalar_tensor"):
        return _of(argument(node, "s" if name == "scalar_tensor" else "fill_value"), known)
    operands = [_of(a, known) for a in args[:3] if not isinstance(a, (list, tuple))]
    if is_view_or_copy(node):
        return _moved(node, operands[0]) if operands else None
    if node.kwargs:
        return None
    if name == "where" and operands[0] in ((0, 0), (1, 1)) and len(operands) == 3:
        return operands[1] if operands[0] == (1, 1) else operands[2]
    if name in _ANDS and (0, 0) in operands:
        return 0, 0
    pair = [bounds for bounds in operands if bounds is not None]
    return _of_two(name, pair[0], pair[1], tensors(node)[0].dtype) if len(operands) == len(pair) == 2 else None


def _of_two(name: str, a: Bounds, b: Bounds, dtype: torch.dtype) -> Bounds | None:
    if name in _COMPARISONS:
        answer = _COMPARISONS[name](a, b)
        return None if answer is None else (int(answer), int(answer))
    if name in _ANDS and dtype == torch.bool and (a, b) == ((1, 1), (1, 1)):
        return 1, 1
    if name in _SUMS and not dtype.is_floating_point:
        return (a[0] + b[0], a[1] + b[1]) if name == "add" else (a[0] - b[1], a[1] - b[0])
    return None


def _range(node: fx.Node) -> Bounds | None:
    """Return an arange's bounds: its start, and infinity, because its length is not used."""
    overload = str(getattr(node.target, "_overloadname", ""))
    start = 0 if overload == "default" else node.args[0]
    step = node.args[2] if overload == "start_step" and len(node.args) > 2 else 1
    return (start, math.inf) if isinstance(start, int) and isinstance(step, int) and step > 0 else None


def _moved(node: fx.Node, bounds: Bounds | None) -> Bounds | None:
    """Return the bounds of a view, a copy or a cast; a cast keeps only 0 and 1, which every dtype has."""
    before, after = tensors(node.all_input_nodes[0]), tensors(node)[0].dtype
    is_same = len(before) == 1 and before[0].dtype == after
    return bounds if is_same or (op_name(node) == "to" and bounds in ((0, 0), (1, 1))) else None


def _erase_unread(graph: fx.Graph, candidates: list[fx.Node]) -> None:
    """Erase the ``candidates`` that no node reads, and then the nodes that only they read."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    queue = sorted(set(candidates), key=order.__getitem__)
    while queue:
        node = queue.pop()
        is_needed = node.users or mutated_inputs(node) or draws_random_numbers(node)
        if node.op == "call_function" and not is_needed:
            queue = sorted({*queue, *node.all_input_nodes} - {node}, key=order.__getitem__)
            graph.erase_node(node)
