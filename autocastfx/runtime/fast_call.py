"""How a graph runs where no compiler looks: with little Python around its operators.

A call of an operator's overload (``torch.ops.aten.add.Tensor``) takes about a microsecond more than ``torch.add``,
which is what a model calls, and of an operator that is a Python function some ten; and each step on the way to
``self.encoder.layers.weight`` passes a Python function of ``nn.Module``. On a GPU a graph's kernels often take less
time than that. So the code that runs names torch's own functions, and is given the parameters and buffers that the
graph reads before its first op, by way of the dictionaries that modules keep. A graph that runs code which it does
not show, and so may change them, runs as it is; so does any for as long as one of them is something else: computed by
a parametrization, say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autocastfx.graph.black_box import is_opaque
from autocastfx.runtime.operators.layer_norm import compute_layer_norm, layer_norm

__all__ = ["QUICK", "Reads", "quick_graph"]

_TORCH: Any = torch
# Overloads that torch's functions and methods of the same name call, given the same positional arguments: what a schema
# requires, and as much of the rest as is said below.
_NEURAL = ["linear.default", "gelu.default", "silu.default", "scaled_dot_product_attention.default"]
_ARITHMETIC = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "where.self", "softmax.int"]
_LAYERS = ["matmul.default", "bmm.default", "addmm.default", "conv1d.default", "conv2d.default", "embedding.default"]
_NORMS = ["layer_norm.default", "group_norm.default", "batch_norm.default", "dropout.default", "relu.default"]
_VIEWS = ["transpose.int", "permute.default", "unsqueeze.default", "reshape.default", "flatten.using_ints"]
_REST = ["cat.default", "relu_.default"]
_METHODS = ["to.dtype", "view.default", "expand.default", "contiguous.default", "add_.Tensor"]
_MOST_POSITIONAL = {torch.ops.aten.to.dtype: 4}  # where Python takes less than all by position


def _overload(name: str) -> Any:
    base, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, base), overload)


QUICK: Mapping[Any, Callable[..., Any]] = {
    _overload(name): getattr(owner, name.split(".")[0])
    for owner, lists in (
        (_TORCH._C._nn, (_NEURAL,)),
        (torch, (_ARITHMETIC, _LAYERS, _NORMS, _VIEWS, _REST)),
        (torch.Tensor, (_METHODS,)),
    )
    for names in lists
    for name in names
} | {layer_norm: compute_layer_norm}  # which the dispatcher would call, too, but later


@dataclass(frozen=True)
class Reads:
    """What a graph reads of the module that owns it.

    Attributes:
        modules: each by the number of the one that holds it, and its name there; the owner is number 0.
        values: parameters and buffers, likewise.
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

    def __call__(self, owner: nn.Module) -> list[torch.Tensor] | None:
        """The tensors as they now are; None if one is no parameter and no buffer of a module."""
        found: list[Any] = [owner]
        for holder, name in self.modules:
            module = found[holder]._modules.get(name)
            if module is None:
                return None
            found.append(module)
        values: list[torch.Tensor] = []
        for holder, name in self.values:
            value = found[holder]._parameters.get(name)
            if value is None:
                value = found[holder]._buffers.get(name)
                if value is None:
                    return None
            values.append(value)
        return values


def quick_graph(graph: fx.Graph, kept: Collection[str] = ()) -> tuple[fx.Graph, Reads] | None:
    """A graph that does what ``graph`` does, of which what it reads of its owner are the first inputs; and these.

    None if the graph runs code that it does not show.

    Args:
        graph: of overloads.
        kept: targets that it goes on to read of its owner itself.
    """
    if any(is_opaque(node) for node in graph.nodes):
        return None
    quick = fx.Graph()
    read = [node for node in graph.nodes if node.op == "get_attr" and node.target not in kept]
    made = {node: quick.create_node("placeholder", node.name, name=node.name) for node in read}
    for node in graph.nodes:
        if node not in made:
            copy = made[node] = quick.node_copy(node, made.__getitem__)
            if copy.target in QUICK and _is_called_alike(copy):
                copy.target = QUICK[copy.target]
    return quick, Reads.of([str(node.target) for node in read])


def _is_called_alike(node: fx.Node) -> bool:
    """Whether Python's function takes the arguments of ``node`` as they are given."""
    target: Any = node.target
    required = sum(not (a.has_default_value() or a.kwarg_only) for a in target._schema.arguments)
    return required <= len(node.args) <= _MOST_POSITIONAL.get(target, len(node.args))
