"""Run the kernel of an op of which a list leaves arguments in float32, to see whether it takes them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import OpListError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, example, uses, value
from autocastfx.graph.sizes import abstract_call, dtypes_of
from autocastfx.policy.rule import KeptArgs


def check_kept_args(
    node: fx.Node, kept: KeptArgs, call: Callable[..., Any], gives: tuple[torch.dtype, ...], device: str
) -> None:
    """Run ``node`` on ones, with float32 arguments where a list leaves them so and the node runs in 16 bits.

    Abstract values stand in only where the values are on no such device, or a size depends on data: torch lets them
    pass in mixtures that kernels refuse.

    Args:
        node: of a rewritten graph. What it reads has abstract values.
        kept: what the list says of its op.
        call: what it calls.
        gives: the dtypes that are planned for its values.
        device: the type of the one whose kernels are meant.

    Raises:
        OpListError: the kernel does not take the arguments so, or gives other dtypes; with the place in the list.
    """
    low = [dtype_name(dtype) for dtype in gives if dtype in LOW_DTYPES]
    wide = dict.fromkeys(u.argument for u in uses(node) if u.argument in kept.names and torch.float32 in dtypes(u.node))
    if not low or not wide:
        return
    args, kwargs = map_arg((node.args, node.kwargs), value)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    own = torch.accelerator.current_accelerator(check_available=True)
    is_here = device == "cpu" or (own is not None and device == own.type)
    if is_here and all(_is_known(leaf, device) for leaf in leaves):
        args, kwargs = pytree.tree_unflatten(map(_filled, leaves), spec)
    with random_numbers_kept(), torch.no_grad(), torch._C._DisableAutocast():
        try:
            found = dtypes_of(abstract_call(call, args, kwargs))
        except Exception as error:  # whatever a kernel raises on dtypes that it does not take
            said = next(iter(str(error).splitlines()), type(error).__name__)
            why = f"its kernel does not take that ({said})"
        else:
            why = f"it then gives {', '.join(map(dtype_name, found))}"
            if found == gives:
                return
    op, left = op_name(node), " and ".join(map(repr, wide))
    raise OpListError(
        f"{op} cannot run in {low[0]} with {left} in float32, as node {node.name!r} would: {why}. Take this out of "
        f"'keep_args', or let the op run in float32: 'deny: [{op}]'.",
        kept.source,
    )


def _is_known(leaf: object, device: str) -> bool:
    """True if an argument of this size can be made, for a kernel of the device."""
    if not isinstance(leaf, torch.Tensor):
        return leaf is None or example(leaf) is not None
    is_plain = leaf.layout == torch.strided and leaf.device.type == device
    return is_plain and all(example(n) is not None for n in leaf.shape)


def _filled(leaf: Any) -> Any:
    """A number, or a tensor of ones, or of zeros if it is of integers, which may be indices."""
    if not isinstance(leaf, torch.Tensor):
        return example(leaf)
    sizes = [example(n) for n in leaf.shape]
    return torch.full(sizes, leaf.is_floating_point(), dtype=leaf.dtype, device=leaf.device)
