"""The pass that gives products and masks the sizes and strides for which a device has its fast kernels.

A product whose sizes are no multiple of what a device's kernels read at once runs kernels of older hardware: on an
H200 one of 50,257 columns runs at 127 TFLOP/s, and at 730 where there are 50,304. It is padded with zeros, and what was
asked for is a view of the result. Fused attention refuses a mask whose last stride is not 1: it is laid out anew, once
for all that read it. Both change no number. Where a list says ``tf32`` of a module, its float32 products run so. Large
products with a cast weight write its gradient in float32, where the device can: it is rounded and cast no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from autocastfx.graph import alias
from autocastfx.graph.names import op_name
from autocastfx.graph.node import (
    Origin,
    argument,
    captured_behind,
    dtypes,
    origin,
    place_like,
    set_argument,
    set_origin,
    value,
)
from autocastfx.graph.sizes import abstract_call, concrete_sizes
from autocastfx.passes.patterns.patterns import DENSE_MASK, TF32_PRODUCT, WIDE_LINEAR
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import ALIGNED_PRODUCT, Precision, Recomposed
from autocastfx.policy.rule import Rule, Runs
from autocastfx.runtime.operators.tf32 import tf32_product
from autocastfx.runtime.operators.wide_linear import wide_linear
from autocastfx.runtime.working_copies import working_copy

_aten: Any = torch.ops.aten
_pad_nd = _aten.constant_pad_nd.default
_PADDED_TO = 64  # a tile of the kernels, which some extra columns cost nothing
# Padding costs a copy of the right factor and in backward one of the result's gradient: smaller products do not gain.
_LEAST_ROWS, _LEAST_FLOPS = 256, 2.0**31


class Align(Pass):
    """Pads products, and lays out masks, for the kernels of a device that is among the fast ones by kernel facts."""

    name = "align"

    def __call__(self, state: State) -> State:
        """The state, its graph changed."""
        settings, changed = self.settings, list[Recomposed]()
        multiple = settings.facts.fast_multiples.get(settings.device)
        if multiple is None:
            return state
        written, seen = alias.alias_sets(state.graph).keys(), _Seen(concrete_sizes(state.graph), settings.low)
        low = [n for n, placement in state.placements.items() if placement.run is Precision.LOW and n not in written]
        if ALIGNED_PRODUCT in settings.recompose:
            changed += pad_products(low, multiple, seen)
        if DENSE_MASK in settings.recompose:
            changed += lay_out_masks(low, written, seen)
        if TF32_PRODUCT in settings.recompose:
            wide = [node for node, placement in state.placements.items() if placement.run is Precision.FLOAT32]
            changed += use_tf32([node for node in wide if _says_tf32(settings.matcher(node))], seen)
        least = settings.facts.float32_gradients.get(settings.device)
        if WIDE_LINEAR in settings.recompose and least is not None and settings.mode != "eval":
            changed += write_float32_gradients(low, written, seen, least)
        return replace(state, recomposed=(*state.recomposed, *changed)) if changed else state


@dataclass(frozen=True)
class _Product:
    """The arguments of a product of a matrix ``right`` with rows ``left``, and the dimensions of ``right``."""

    left: str
    right: str
    bias: str | None
    columns: int  # of the result
    inner: int


_PRODUCTS: Mapping[Any, _Product] = {
    _aten.linear.default: _Product("input", "weight", "bias", 0, 1),
    _aten.addmm.default: _Product("mat1", "mat2", "self", 1, 0),
    _aten.mm.default: _Product("self", "mat2", None, 1, 0),
    _aten.matmul.default: _Product("self", "other", None, 1, 0),
}


# How new nodes are called, behind the name of what they are made of.
_MADE: Mapping[Any, str] = {
    _pad_nd: "padded",
    _aten.t.default: "transposed",
    _aten.slice.Tensor: "once",
    _aten.clone.default: "dense",
    _aten.expand_as.default: "expanded",
}
_LOOK_AT_STRIDES = (_aten.as_strided.default, _aten.as_strided_.default, _aten.view.dtype)


@dataclass(frozen=True)
class _Seen:
    """Gives what a node gives for the sizes of the example inputs, though casts have no abstract values yet."""

    sizes: Callable[[Any], Any]
    low: torch.dtype

    def __call__(self, node: fx.Node) -> Any:
        source = captured_behind(node)
        given = self.sizes(value(source))
        return given if node is source else _run(_aten.to.dtype, given, self.low)


def pad_products(nodes: Iterable[fx.Node], multiple: int, seen: Callable[[fx.Node], Any]) -> list[Recomposed]:
    """Pad those of the 16-bit ``nodes`` that are products whose sizes are no multiple of ``multiple``, in place.

    A product stays as it is if it is small, if the matrix has other sizes in other calls, or if what views its result
    needs its strides.
    """
    padded: list[Recomposed] = []
    for node in nodes:
        product = _PRODUCTS.get(node.target)
        if product is None or not _is_large(node, product, seen, _LEAST_FLOPS, _LEAST_ROWS):
            continue
        right = argument(node, product.right)
        matrix = seen(right)
        if not _is_sized(value(captured_behind(right))):  # of a batch's own rows, say: the amounts are numbers here
            continue
        columns, inner = (
            -matrix.shape[dim] % _PADDED_TO if matrix.shape[dim] % multiple else 0
            for dim in (product.columns, product.inner)
        )
        if (columns or inner) and (not columns or _may_be_view(node, columns, seen)):
            _pad(node, product, columns, inner, seen)
            padded.append(Recomposed(ALIGNED_PRODUCT, node.name, (node.name,)))
    return padded


def _is_large(node: fx.Node, product: _Product, seen: Callable[[fx.Node], Any], flops: float, least: int = 1) -> bool:
    rows, matrix = seen(argument(node, product.left)), seen(argument(node, product.right))
    if rows.ndim < 2 or matrix.ndim != 2 or not _is_sized(rows) or not _is_sized(matrix):
        return False
    count = math.prod(rows.shape[:-1])
    return count >= least and 2.0 * count * math.prod(matrix.shape) >= flops


def _is_sized(given: torch.Tensor) -> bool:
    """False where a size depends on data, of which there is no example, or in abstract values on the call."""
    return all(isinstance(size, int) for size in (*given.shape, *given.stride()))


def _may_be_view(node: fx.Node, columns: int, seen: Callable[[fx.Node], Any]) -> bool:
    """True if all that reads the result can read the first columns of one with ``columns`` more.

    Views of such strides are tried. What looks at strides in another way, or is not known, is taken for what cannot.
    """
    asked = seen(node)
    padded = _run(_aten.new_empty.default, asked, [*asked.shape[:-1], asked.shape[-1] + columns])
    results = {node: _run(_aten.slice.Tensor, padded, -1, 0, asked.shape[-1])}
    nodes = list(node.graph.nodes)
    for read in nodes[nodes.index(node) + 1 :]:
        if read.op == "output" or results.keys().isdisjoint(read.all_input_nodes):
            continue
        is_known = isinstance(read.target, OpOverload) or op_name(read) == "getitem"
        if not is_known or read.target in _LOOK_AT_STRIDES:
            return False
        if alias.is_view(read) or op_name(read) == "getitem":
            args, kwargs = map_arg((read.args, read.kwargs), lambda n: results[n] if n in results else seen(n))
            try:
                results[read] = _run(read.target, *args, **kwargs)
            except (RuntimeError, ValueError):  # a view that these strides do not allow
                return False
    return True


def _pad(node: fx.Node, product: _Product, columns: int, inner: int, seen: Callable[[fx.Node], Any]) -> None:
    """Pad the factors of ``node`` by so many zeros, and let its readers read what it gave before."""
    width, readers = seen(node).shape[-1], list(node.users)
    amounts = {product.columns: columns, product.inner: inner}
    right = _before(node, _pad_nd, argument(node, product.right), [0, amounts[1], 0, amounts[0]])
    set_argument(node, product.right, right)
    if inner:
        set_argument(node, product.left, _before(node, _pad_nd, argument(node, product.left), [0, inner]))
    if not columns:
        return
    bias = argument(node, product.bias) if product.bias else None
    if bias is not None and seen(bias).ndim and seen(bias).shape[-1] == width:
        set_argument(node, product.bias or "", _before(node, _pad_nd, bias, [0, columns]))
    with node.graph.inserting_after(node):
        asked = node.graph.create_node(
            "call_function", _aten.slice.Tensor, (node, -1, 0, width), {}, f"{node.name}_asked"
        )
    _describe(asked, node)
    for reader in readers:
        reader.replace_input_with(node, asked)


def _before(node: fx.Node, target: Any, read: fx.Node, *given: Any, **options: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_function", target, (read, *given), options, f"{read.name}_{_MADE[target]}")
    _describe(made, read)
    return made


def _describe(made: fx.Node, source: fx.Node) -> None:
    """Note of which value a new node is made. Verify gives it what it gives."""
    place_like(made, source)
    set_origin(made, Origin("align", "storage", source.name))


def _run(target: Any, *args: Any, **kwargs: Any) -> Any:
    return abstract_call(target, args, kwargs)


def lay_out_masks(
    nodes: Iterable[fx.Node], written: Collection[fx.Node], seen: Callable[[fx.Node], Any]
) -> list[Recomposed]:
    """Let fused attention among the 16-bit ``nodes`` read masks whose last stride is 1, in place.

    What a dimension of a mask repeats stays repeated in memory. A mask that is ``written`` into stays as it is.
    """
    laid_out: list[Recomposed] = []
    dense: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        mask = argument(node, "attn_mask") if op_name(node) == "scaled_dot_product_attention" else None
        if mask is None or captured_behind(mask) in written:
            continue
        given = seen(mask)
        if not _is_sized(given) or given.ndim == 0 or given.shape[-1] == 1 or given.stride(-1) == 1:
            continue
        if mask not in dense:
            dense[mask] = _laid_out(mask, given)
        set_argument(node, "attn_mask", dense[mask])
        laid_out.append(Recomposed(DENSE_MASK, node.name, (node.name,)))
    return laid_out


def _says_tf32(rule: Rule[Runs] | None) -> bool:
    return rule is not None and rule.effect.word == "tf32"


def use_tf32(nodes: Iterable[fx.Node], seen: Callable[[fx.Node], Any]) -> list[Recomposed]:
    """Let those of the float32 ``nodes`` that are products with a matrix compute in TF32, in place."""
    changed: list[Recomposed] = []
    for node in nodes:
        product = _PRODUCTS.get(node.target)
        if product is None:
            continue
        left, right = argument(node, product.left), argument(node, product.right)
        if seen(right).ndim != 2 or seen(left).ndim < 2:
            continue
        bias = argument(node, product.bias) if product.bias else None
        if _is_scaled(node) or (bias is not None and seen(bias).ndim != 1):
            continue
        if product.columns == 0:
            right = _before(node, _aten.t.default, right)
        node.target, node.args, node.kwargs = tf32_product, (left, right, bias), {}
        changed.append(Recomposed(TF32_PRODUCT, node.name, (node.name,)))
    return changed


def _is_scaled(node: fx.Node) -> bool:
    return any(argument(node, name) not in (None, 1) for name in ("alpha", "beta"))


def write_float32_gradients(
    nodes: Iterable[fx.Node], written: Collection[fx.Node], seen: Callable[[fx.Node], Any], least: float
) -> list[Recomposed]:
    """Let those of the 16-bit ``nodes`` that are products with a cast matrix give it a float32 gradient, in place.

    Smaller ones than ``least`` floating-point operations stay: the host takes longer for them than the device.
    """
    changed: list[Recomposed] = []
    for node in nodes:
        product = _PRODUCTS.get(node.target)
        if product is None or _is_scaled(node) or not _is_large(node, product, seen, least):
            continue
        right, bias = argument(node, product.right), argument(node, product.bias) if product.bias else None
        wide, wide_bias = _float32_of(right, written), None if bias is None else _float32_of(bias, written)
        if wide is None or (bias is not None and (wide_bias is None or seen(bias).ndim != 1)):
            continue
        args = (argument(node, product.left), wide, right, wide_bias, bias, product.columns == 1)
        node.target, node.args, node.kwargs = wide_linear, args, {}
        changed.append(Recomposed(WIDE_LINEAR, node.name, (node.name,)))
    return changed


def _float32_of(low: fx.Node, written: Collection[fx.Node]) -> fx.Node | None:
    """Return the float32 value of which a pass has made ``low``; None where another is, or where that is written to."""
    if origin(low) is None or low.target not in (_aten.to.dtype, working_copy):
        return None
    source = low.args[1 if low.target is working_copy else 0]
    if not isinstance(source, fx.Node) or source in written or dtypes(source) != (torch.float32,):
        return None
    return source


def _laid_out(mask: fx.Node, given: torch.Tensor) -> fx.Node:
    """Return a copy of ``mask`` with a last stride of 1, before the first node that could read it."""
    after, once = mask.next, mask
    for dim in range(given.ndim - 1):
        if given.shape[dim] > 1 and given.stride(dim) == 0:
            once = _before(after, _aten.slice.Tensor, once, dim, 0, 1)
    made = _before(after, _aten.clone.default, once, memory_format=torch.contiguous_format)
    if once is mask:
        return made
    return _before(after, _aten.expand_as.default, made, mask)
