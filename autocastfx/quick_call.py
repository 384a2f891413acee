"""How a graph runs where no compiler looks: with little Python around its operators.

A call of an operator's overload (``torch.ops.aten.add.Tensor``) takes about a microsecond more than ``torch.add``,
which is what a model calls; and each step on the way to ``self.encoder.layers.weight`` passes a Python function of
``nn.Module``. On a GPU a graph's kernels often take less time than that. So the code that runs names torch's own
functions, and is given all that the graph reads of its owner, by way of the dictionaries that modules keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

__all__ = ["QUICK", "Reads", "quick_graph"]

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


@dataclass(frozen=True)
class Reads:
    """What a graph reads of the module that owns it.

    Attributes:
        modules: each by the number of the one that holds it, and its name there; the owner is number 0.
        values: parameters, buffers and other attributes, likewise.
    """

    modules: tuple[tuple[int, str], ...]
    values: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, targets: list[str]) -> Reads:
        """Those of the attributes at these paths."""
        numbers: dict[str, int] = {"": 0}
        modules: list[tuple[int, str]] = []

        def number(path: str) -> int:
            if path not in numbers:
                holder, _, name = path.rpartition(".")
                modules.append((number(holder), name))
                numbers[path] = len(modules)
            return numbers[path]

        values = [(number(holder), name) for holder, _, name in (target.rpartition(".") for target in targets)]
        return cls(tuple(modules), tuple(values))

    def __call__(self, owner: nn.Module) -> list[Any]:
        """The values as they now are.

        Raises:
            AttributeError: there is no such attribute.
        """
        found = [owner]
        for holder, name in self.modules:
            module = found[holder]._modules.get(name)
            found.append(getattr(found[holder], name) if module is None else module)
        values: list[Any] = []
        for holder, name in self.values:
            value = found[holder]._parameters.get(name)
            values.append(getattr(found[holder], name) if value is None else value)
        return values


def quick_graph(graph: fx.Graph) -> tuple[fx.Graph, Reads]:
    """A graph that does what ``graph`` does, of which what it reads of its owner are the first inputs; and these."""
    quick = fx.Graph()
    read = [node for node in graph.nodes if node.op == "get_attr"]
    made = {node: quick.create_node("placeholder", node.name, name=node.name) for node in read}
    for node in graph.nodes:
        if node not in made:
            copy = made[node] = quick.node_copy(node, made.__getitem__)
            copy.target = QUICK.get(copy.target, copy.target) if copy.op == "call_function" else copy.target
    return quick, Reads.of([str(node.target) for node in read])
