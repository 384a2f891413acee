"""Python's own functions for operators: what they run is the same, and they take less time to get there.

A call of an operator's overload by its name (``torch.ops.aten.add.Tensor``) takes about a microsecond more than
``torch.add`` takes, which is what a model calls. On a GPU, where a graph's calls often take longer than its kernels, a
graph should cost no more than the model that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

__all__ = ["QUICK", "called_quickly"]

_TORCH: Any = torch
# Overloads that torch's functions and methods of the same name call, given the same arguments in the same order.
_OF: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_TORCH._C._nn, ("linear.default", "gelu.default", "silu.default", "scaled_dot_product_attention.default")),
    (
        torch,
        (
            *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "where.self", "relu.default"),
            *(
                "matmul.default",
                "bmm.default",
                "addmm.default",
                "conv1d.default",
                "conv2d.default",
                "embedding.default",
            ),
            *("layer_norm.default", "group_norm.default", "batch_norm.default", "softmax.int", "dropout.default"),
            *("transpose.int", "permute.default", "unsqueeze.default", "reshape.default", "flatten.using_ints"),
            *("cat.default", "relu_.default"),
        ),
    ),
    (torch.Tensor, ("to.dtype", "view.default", "expand.default", "contiguous.default", "add_.Tensor")),
)


def _overload(name: str) -> Any:
    base, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, base), overload)


QUICK: Mapping[Any, Callable[..., Any]] = {
    _overload(name): getattr(owner, name.split(".")[0]) for owner, names in _OF for name in names
}


@contextmanager
def called_quickly(graph: fx.Graph) -> Generator[None]:
    """Within the block, ``graph`` names these functions in place of the overloads: for the code that runs it."""
    nodes = [(node, node.target) for node in graph.nodes if node.op == "call_function" and node.target in QUICK]
    try:
        for node, target in nodes:
            node.target = QUICK[target]
        yield
    finally:
        for node, target in nodes:
            node.target = target
