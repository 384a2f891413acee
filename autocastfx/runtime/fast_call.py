"""Rewrite a graph for eager calls, with little Python overhead around its operators.

Calling an operator's overload (``torch.ops.aten.add.Tensor``) takes about a microsecond more than ``torch.add``, and
calling an operator written in Python some ten. Each attribute in ``self.encoder.layers.weight`` costs a Python call of
``nn.Module``. On a GPU the kernels often take less time than that. The quick graph therefore calls torch's own
functions, and takes the parameters and buffers as inputs, read from the modules' dictionaries before its first op.
Working copies are read some at a time, and the batches that batch norms count are counted at once.

A graph with opaque code, which may change its parameters, runs unchanged. So does any graph while a tensor that it
reads is not a plain parameter or buffer, but is computed by a parametrization, for example.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.graph.alias import is_opaque
from autocastfx.runtime.operators.norms import compute_layer_norm, layer_norm
from autocastfx.runtime.working_copies import working_copies, working_copy

__all__ = ["QUICK", "Reads", "add_one", "quick_graph"]

_TORCH: Any = torch
# Overloads that torch's functions and methods of the same name call when given the same positional arguments: all that
# the schema requires, and at most as many as ``_MOST_POSITIONAL`` says.
_NEURAL = ["linear.default", "gelu.default", "silu.default", "scaled_dot_product_attention.default"]
_ARITHMETIC = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "where.self", "softmax.int"]
_LAYERS = ["matmul.default", "bmm.default", "addmm.default", "conv1d.default", "conv2d.default", "embedding.default"]
_NORMS = ["layer_norm.default", "group_norm.default", "dropout.default", "relu.default"]
_VIEWS = ["transpose.int", "permute.default", "unsqueeze.default", "reshape.default", "flatten.using_ints"]
_REST = ["cat.default", "relu_.default"]
_METHODS = ["to.dtype", "view.default", "expand.default", "contiguous.default", "add_.Tensor"]
# Working copies read at a time: more would keep more 16-bit gradients until all of them are there.
_COPIES = 16
_MOST_POSITIONAL = {torch.ops.aten.to.dtype: 4}  # where Python's method does not take all arguments by position


def _batch_norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``torch.batch_norm``, which takes no float32 parameters beside 16-bit values under ``torch.vmap``."""
    if x.dtype in LOW_DTYPES and torch._C._are_functorch_transforms_active():
        return torch.batch_norm(x.float(), *rest).to(x.dtype)
    return torch.batch_norm(x, *rest)


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
} | {
    _overload("batch_norm.default"): _batch_norm,
    layer_norm: compute_layer_norm,  # the function that the dispatcher would call
}
# A method that knows its dtype takes three quarters of the time of one that is told.
_CASTS: Mapping[tuple[Any, ...], Callable[..., Any]] = {
    (torch.float16,): torch.Tensor.half,
    (torch.bfloat16,): torch.Tensor.bfloat16,
    (torch.float32,): torch.Tensor.float,
}


@dataclass(frozen=True)
class Reads:
    """The tensors that a graph reads from its owner, as a plan for looking them up.

    Attributes:
        modules: for each module on the way, the number of its parent and its name there; the owner is number 0.
        values: for each parameter or buffer, the number of its module and its name there.
    """

    modules: tuple[tuple[int, str], ...]
    values: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, targets: list[str]) -> Reads:
        """Make the plan for the attributes at these paths."""
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
        """Look up the tensors; None if one is neither a parameter nor a buffer."""
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
    """Return an equivalent graph that takes the tensors of its owner as first inputs, and how to look these up.

    None if the graph runs opaque code.

    Args:
        graph: a graph that calls overloads.
        kept: targets of ``get_attr`` nodes that stay.
    """
    if any(is_opaque(node) for node in graph.nodes):
        return None
    quick = fx.Graph()
    read = [node for node in graph.nodes if node.op == "get_attr" and node.target not in kept]
    made = {node: quick.create_node("placeholder", node.name, name=node.name) for node in read}
    for node in graph.nodes:
        if node not in made:
            copy = made[node] = quick.node_copy(node, made.__getitem__)
            if copy.target is torch.ops.aten.to.dtype and copy.args[1:] in _CASTS and not copy.kwargs:
                copy.target, copy.args = _CASTS[copy.args[1:]], copy.args[:1]
            elif copy.target in QUICK and _is_called_alike(copy):
                copy.target = QUICK[copy.target]
    _copy_constants(quick)
    _read_together(quick)
    _count_together(quick)
    return quick, Reads.of([str(node.target) for node in read])


def _copy_constants(quick: fx.Graph) -> None:
    """Copy a constant of the code (``torch.tensor``) by ``clone``, which ``torch.vmap`` can do."""
    for copy in quick.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default):
        copy.target = torch.clone


def _read_together(quick: fx.Graph) -> None:
    """Read working copies some at a time, in place."""
    reads = [node for node in quick.nodes if node.target is working_copy and _is_input(node.args[1])]
    for (copies, dtype), alike in itertools.groupby(reads, lambda node: (node.args[0], node.args[2])):
        while some := list(itertools.islice(alike, _COPIES)):
            with quick.inserting_before(some[0]):
                masters = [node.args[1] for node in some]
                together = quick.call_function(working_copies, (copies, masters, dtype))
                each = [quick.call_function(operator.getitem, (together, i)) for i in range(len(some))]
            for node, copy in zip(some, each, strict=True):
                node.replace_all_uses_with(copy)
                quick.erase_node(node)


def _count_together(quick: fx.Graph) -> None:
    """Count the batches of all batch norms by one call, which is one kernel on a GPU."""
    adds = quick.find_nodes(op="call_function", target=torch.Tensor.add_)
    counts = [node for node in adds if node.args[1:] == (1,) and not node.kwargs and _is_read_alone(node)]
    if len(counts) > 1:
        with quick.inserting_before(counts[0]):
            quick.call_function(add_one, ([node.args[0] for node in counts],))
        for node in counts:
            quick.erase_node(node)


def _is_read_alone(add: fx.Node) -> bool:
    """True if ``add`` writes into an input that nothing else reads, and nothing reads its result."""
    (written, *_) = add.args
    return isinstance(written, fx.Node) and _is_input(written) and len(written.users) == 1 and not add.users


def add_one(counters: list[torch.Tensor]) -> None:
    """Add 1 to each tensor, in place. A tensor that is listed twice gets 2."""
    if len(set(map(id, counters))) < len(counters) or torch._C._are_functorch_transforms_active():
        for counter in counters:
            counter.add_(1)
    else:
        cast("Any", torch)._foreach_add_(counters, 1)


def _is_input(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "placeholder"


def _is_called_alike(node: fx.Node) -> bool:
    """True if torch's Python function takes the arguments of ``node`` in the given form."""
    target: Any = node.target
    required = sum(not (a.has_default_value() or a.kwarg_only) for a in target._schema.arguments)
    return required <= len(node.args) <= _MOST_POSITIONAL.get(target, len(node.args))
