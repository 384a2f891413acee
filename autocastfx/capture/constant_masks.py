"""Remove masks that are known whatever the inputs, and the ops that they make needless.

Under torch.export models build attention masks even if nothing is hidden, from ones, zeros and comparisons of positions
with 0. Such a mask is one number everywhere, and adding it changes nothing. They build causal masks from comparisons of
positions with each other, for torch refuses ``is_causal`` there; but a fused kernel that takes ``is_causal`` is faster
than one that takes a mask, and flash attention takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import fx

from autocastfx.capture.affine import Affine, Chosen, Known, constant
from autocastfx.capture.known_values import ANDS, SUMS, known_values, of_operand
from autocastfx.graph.alias import alias_sets, handed_out, mutated_inputs, seen_by_functions
from autocastfx.graph.magnitude import read_as_scores
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, draws_random_numbers, example, set_argument, tensors

__all__ = ["drop_settled"]


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
    found = tensors(zeros) if isinstance(zeros, fx.Node) else ()
    return any(t.dtype == torch.float32 and (t.ndim > 0 or tensors(total)[0].ndim == 0) for t in found)


def _stands_for(kept: fx.Node, node: fx.Node) -> bool:
    """True if ``kept`` can replace ``node``: dtype, device, sizes and strides are the same."""
    a, b = tensors(kept), tensors(node)
    if len(a) != 1 or len(b) != 1 or (a[0].dtype, a[0].device, a[0].ndim) != (b[0].dtype, b[0].device, b[0].ndim):
        return False
    pairs = [*zip(a[0].shape, b[0].shape, strict=True), *zip(a[0].stride(), b[0].stride(), strict=True)]
    return all(_equal(m, n) for m, n in pairs)


def _equal(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


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
    if not isinstance(known, Chosen):
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
    order = {node: i for i, node in enumerate(graph.nodes)}
    queue = sorted(set(candidates), key=order.__getitem__)
    while queue:
        node = queue.pop()
        is_needed = node.users or mutated_inputs(node) or draws_random_numbers(node)
        if node.op == "call_function" and not is_needed:
            queue = sorted({*queue, *node.all_input_nodes} - {node}, key=order.__getitem__)
            graph.erase_node(node)
