"""Compute what float8 operands change in each of the three matrix products of a node."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument
from autocastfx.numerics.segments import Read
from autocastfx.policy.float8 import OPERANDS, RECIPES, Product
from autocastfx.runtime.operators.float8 import float8_linear

_KEPT = torch.bfloat16  # of a difference itself, 8 bits are enough


@dataclass(frozen=True)
class ProductDifferences:
    """The differences between float8 products of a node and exact ones, for those of its products that ran.

    Attributes:
        sizes: M, N and K of the output's product, ``[M, K] @ [K, N]``.
        output: of the value that the node gives, in bfloat16 as all differences; None if the recipe has none.
        gradients: by the place of a read, which product gives the gradient by it, and the difference of that.
    """

    sizes: tuple[int, int, int]
    output: torch.Tensor | None
    gradients: Mapping[int, tuple[Product, torch.Tensor]]

    @property
    def products(self) -> tuple[Product, ...]:
        """The products that ran and that the recipe has."""
        of_output = (Product.OUTPUT,) if self.output is not None else ()
        return (*of_output, *(product for product, _ in self.gradients.values()))


def product_differences(
    recipe: str,
    node: fx.Node,
    values: Callable[[fx.Node], Any],
    reads: Sequence[Read],
    gradient: torch.Tensor | None,
    returned: Container[tuple[fx.Node, int]],
) -> ProductDifferences | None:
    """Compute the products of ``node``, of a captured graph, twice from the same exact operands: in float8, and
    exactly.

    ``values`` tells what a node gave, ``reads`` are the node's float32 reads, in order, and ``gradient`` is that of its
    value, all in float32; without one only the output's product ran. ``returned`` holds nodes and places of the reads
    from where a gradient comes back: no product is computed for a frozen weight.

    Returns:
        None if the node has no float8 products, whatever a list says: by its op, form or sizes.
    """
    operands = OPERANDS.get(op_name(node))
    by_name = {read.use.argument: read for read in reads}
    if operands is None or operands.input not in by_name or operands.weight not in by_name:
        return None
    of_input, of_weight = by_name[operands.input], by_name[operands.weight]
    x, weight = (values(read.use.node).detach() for read in (of_input, of_weight))
    is_scaled = any(argument(node, name) not in (None, 1) for name in ("alpha", "beta"))
    is_odd = any(size % RECIPES[recipe].multiple for size in weight.shape)
    is_other = operands.transposes and of_weight.use.node.op != "get_attr"
    if weight.dim() != 2 or is_odd or not x.numel() or is_scaled or is_other:
        return None
    weight = weight.t() if operands.transposes else weight
    layouts = RECIPES[recipe].layouts
    wanted = {Product.INPUT_GRADIENT: of_input, Product.WEIGHT_GRADIENT: of_weight}
    is_back = gradient is not None
    wanted = {p: read for p, read in wanted.items() if p in layouts and is_back and (node, read.place) in returned}
    exact = _run(torch.ops.aten.linear.default, x, weight, gradient, wanted)
    rest = (None, [], [], [], [], recipe, " ".join(layouts), True)  # no bias, nothing quantised before; emulated
    rounded = _run(float8_linear, x, weight, gradient, wanted, *rest)
    changed = [(there - here).nan_to_num_(0.0, 0.0, 0.0).to(_KEPT) for there, here in zip(rounded, exact, strict=True)]
    by_read = dict(zip(wanted, changed[1:], strict=True))
    if operands.transposes and Product.WEIGHT_GRADIENT in by_read:
        by_read[Product.WEIGHT_GRADIENT] = by_read[Product.WEIGHT_GRADIENT].t()
    return ProductDifferences(
        (x.numel() // x.shape[-1], *cast("tuple[int, int]", tuple(weight.shape))),
        changed[0] if Product.OUTPUT in layouts else None,
        {wanted[product].place: (product, difference) for product, difference in by_read.items()},
    )


def _run(
    target: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    wanted: Mapping[Product, Read],
    *rest: Any,
) -> list[torch.Tensor]:
    """The value of ``target``, and its gradients that are wanted."""
    with torch.inference_mode(False), torch.set_grad_enabled(bool(wanted)), torch._C._DisableAutocast():
        leaves = {Product.INPUT_GRADIENT: x.detach(), Product.WEIGHT_GRADIENT: weight.detach()}
        for product in wanted:
            leaves[product].requires_grad_()
        made = target(*leaves.values(), *rest)
        back = torch.autograd.grad(made, [leaves[p] for p in wanted], gradient) if wanted else ()
    return [made.detach(), *back]
