"""Store the weights of a converted model in 16 bits (``weights="low"``), for inference only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.errors import UnsupportedError
from autocastfx.graph.node import dtypes
from autocastfx.runtime.variant import Variant

_INSTEAD = 'Convert with weights="cast" or weights="cached" to train, or for gradients.'


def stored_low(variant: Variant, low: torch.dtype) -> frozenset[str]:
    """Return the names of the parameters that a newly made graph reads in 16 bits."""
    reads = (node for node in variant.graph.nodes if node.op == "get_attr")
    return frozenset(str(node.target) for node in reads if dtypes(node) == (low,))


def own_tensors(modules: Iterable[nn.Module], low_ones: Iterable[torch.Tensor], low: torch.dtype) -> None:
    """Replace all parameters and buffers of ``modules`` by copies that require no gradient; tied ones share a copy.

    Args:
        modules: the modules to change.
        low_ones: the parameters whose copies are 16-bit.
        low: the 16-bit dtype.
    """
    narrow = {id(t) for t in low_ones}
    made: dict[int, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            plain = tensor.detach().to(low) if id(tensor) in narrow else tensor.detach().clone()
            made[id(tensor)] = nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain
        return made[id(tensor)]

    with torch.inference_mode(False):
        for module in modules:
            tables: tuple[Any, ...] = (module._parameters, module._buffers)
            for table in tables:
                table.update({name: own(tensor) for name, tensor in table.items() if tensor is not None})


def refuse_training() -> None:
    """Refuse training.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f'weights="low" keeps no float32 weights, so the model cannot train. {_INSTEAD}')


def refuse_gradients(outputs: Any) -> None:
    """Refuse outputs that require gradients.

    Raises:
        UnsupportedError: an output requires gradients.
    """
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(outputs)):
        raise UnsupportedError(
            'weights="low" is for inference: an input or a parameter requires gradients, which would be 16-bit ones. '
            f"Call under torch.no_grad(). {_INSTEAD}"
        )
