"""Rewrite a graph for eager calls, with little Python overhead around its operators."""

from __future__ import annotations

import itertools
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import FunctionType
from typing import Any, cast

import torch
from torch import fx
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.errors import ClippedValuesWarning
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_cast, origin
from autocastfx.runtime.operators.casts import is_concrete, saturating_cast, through
from autocastfx.runtime.operators.norms import compute_layer_norm, layer_norm
from autocastfx.runtime.working_copies import working_copies, working_copy
from autocastfx.training.loss_scale import HostCopy, is_capturing

# Calling an operator's overload (``torch.ops.aten.add.Tensor``) takes about a microsecond more than ``torch.add``,
# and calling an operator written in Python some ten. Each attribute in ``self.encoder.layers.weight`` costs a Python
# call of ``nn.Module``. On a GPU the kernels often take less time than that. The quick graph therefore calls torch's
# own functions, and takes the parameters and buffers as inputs, read from the modules' dictionaries before its first
# op. Working copies are read some at a time, and the batches that batch norms count are counted at once.
#
# A graph with opaque code, which may change its parameters, runs unchanged. So does any graph while a tensor that it
# reads is not a plain parameter or buffer, but is computed by a parametrization, for example.

# Overloads that torch's functions and methods of the same name call when given the same positional arguments: all that
# the schema requires, and at most as many as ``_MOST_POSITIONAL`` says.
_ALIKE: Sequence[tuple[Any, str]] = (
    (cast("Any", torch)._C._nn, "linear.default gelu.default silu.default scaled_dot_product_attention.default"),
    (torch, "add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default where.self softmax.int"),
    (torch, "matmul.default bmm.default addmm.default conv1d.default conv2d.default embedding.default"),
    (torch, "layer_norm.default group_norm.default dropout.default relu.default"),
    (torch, "transpose.int permute.default unsqueeze.default reshape.default flatten.using_ints"),
    (torch, "cat.default relu_.default mean.default mean.dim"),
    (torch.Tensor, "to.dtype view.default expand.default contiguous.default add_.Tensor"),
)
# Working copies read at a time: more would keep more 16-bit gradients until all of them are there.
_COPIES = 16
_OURS = f"{__name__.partition('.')[0]}."
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
    _overload(name): getattr(owner, name.split(".")[0]) for owner, names in _ALIKE for name in names.split()
} | {
    _overload("batch_norm.default"): _batch_norm,
    _overload("sym_size.int"): torch.Tensor.size,  # of one example, under ``torch.vmap``
    layer_norm: compute_layer_norm,  # the function that the dispatcher would call
}
# A method that knows its dtype takes three quarters of the time of one that is told.
_CASTS: Mapping[tuple[Any, ...], Callable[..., Any]] = {
    (torch.float16,): torch.Tensor.half,
    (torch.bfloat16,): torch.Tensor.bfloat16,
    (torch.float32,): torch.Tensor.float,
}


def lift(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """Return a copy of ``graph`` that takes what it reads by ``names``, inputs or attributes, as inputs in this order.

    Other inputs, which nothing reads, are left out.
    """
    lifted = fx.Graph()
    inputs = {
        name: lifted.create_node("placeholder", name, name=re.sub(r"\W", "_", name.removeprefix("get_attr ")))
        for name in names
    }
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        key = f"{node.op} {node.target}" if f"{node.op} {node.target}" in inputs else str(node.target)
        if node.op in ("placeholder", "get_attr") and key in inputs:
            made[node] = inputs[key]
            made[node].meta.update(node.meta)
        elif node.op != "placeholder" or node.users:
            made[node] = lifted.node_copy(node, made.__getitem__)
    for node in inputs.values():
        node.target = node.name  # an argument of Python, and no path
    return lifted


def quickened(graph: fx.Graph) -> fx.Graph:
    """Let a graph, which is for running alone, call functions that take the host less time; returns it."""
    _return_on_the_way(graph)
    call_quick(graph)
    count_clipped(graph)
    _read_together(graph)
    _count_together(graph)
    return graph


def _return_on_the_way(graph: fx.Graph) -> None:
    """Let gradients of 16-bit values that are returned in float32 come through what is returned."""
    for wide in graph.output_node().all_input_nodes:
        mark = origin(wide)
        if mark is None or not is_cast(wide) or mark.rule != "reader" or wide.target is not torch.ops.aten.to.dtype:
            continue
        low = wide.all_input_nodes[0]
        if low.op not in ("placeholder", "get_attr") and len(low.users) > 1:
            with graph.inserting_after(wide):
                passed = graph.call_function(through, (low, wide))
            passed.meta.update(low.meta)
            low.replace_all_uses_with(passed, partial(operator.lt, passed))


def call_quick(graph: fx.Graph, *, torchs_alone: bool = False) -> None:
    """Let a graph call torch's functions, and ours, in the place of operators; with ``torchs_alone`` torch's alone."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.to.dtype and node.args[1:] in _CASTS and not node.kwargs:
            node.target, node.args = _CASTS[node.args[1:]], node.args[:1]
        elif node.target in QUICK and _is_called_alike(node):
            function = QUICK[node.target]
            if torchs_alone and isinstance(function, FunctionType) and function.__module__.startswith(_OURS):
                function = torch.batch_norm if function is _batch_norm else node.target
            node.target = function
    _copy_constants(graph)


def count_clipped(graph: fx.Graph) -> bool:
    """Let casts in ``graph``, which is for running alone, count what they clip but masks; say whether there is one."""
    casts = [n for n in graph.find_nodes(op="call_function", target=saturating_cast) if n.args[2] == 65_504]
    for node in casts:
        node.target = _counting_cast(str(node.args[0]))
    return bool(casts)


def _counting_cast(name: str) -> Callable[[torch.Tensor, torch.dtype, float], torch.Tensor]:
    """``saturating_cast`` that tells, once, how much of the value ``name`` it has clipped. Nothing waits for a GPU."""
    sent, is_told, total = HostCopy(), False, None

    def cast_and_count(x: torch.Tensor, dtype: torch.dtype, bound: float) -> torch.Tensor:
        nonlocal is_told, total
        is_recorded = torch._C._are_functorch_transforms_active() or bool(torch._C._get_tracing_state())
        is_recorded |= any_torch_dispatch_mode_on_stack()
        if not is_told and is_concrete(x) and not is_recorded and not is_capturing([x]):
            clipped = ((x.detach().abs() > bound) & x.isfinite()).sum(dtype=torch.float32)
            total = clipped if total is None else total + clipped
            sent.start(total)  # for a later call, if this is not on a CPU
            seen = sent.read(total) if x.device.type == "cpu" else sent.arrived()
            if seen is not None and seen.number:
                is_told = True
                told = (
                    f"{seen.number:,.0f} values of {name!r} were beyond {bound:,.0f} and clipped in float16: results "
                    "may be wrong though finite, and no loss scale sees it. Scale them, convert with calibrate=, which "
                    "keeps what reads them in float32, or use bfloat16. This is told once."
                )
                warnings.warn(told, ClippedValuesWarning, stacklevel=3)
        return saturating_cast(x, dtype, bound)

    return cast_and_count


def _copy_constants(quick: fx.Graph) -> None:
    """Copy a constant of the code (``torch.tensor``) by ``clone``, which ``torch.vmap`` can do."""
    for copied in quick.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default):
        copied.target = torch.clone


def _read_together(quick: fx.Graph) -> None:
    """Read working copies some at a time, in place.

    Those read at once lead to the same outputs, so that all get gradients or none: autograd calls the hooks of a
    parameter, with None, where only others of one node get some.
    """
    reads = [node for node in quick.nodes if node.target is working_copy and _is_input(node.args[1])]
    reached = _outputs_reached(quick) if reads else {}
    reads.sort(key=reached.__getitem__)  # in their order for each set of outputs
    for (copies, dtype, _), alike in itertools.groupby(reads, lambda n: (n.args[0], n.args[2], reached[n])):
        while some := list(itertools.islice(alike, _COPIES)):
            with quick.inserting_before(some[0]):
                masters = [node.args[1] for node in some]
                together = quick.call_function(working_copies, (copies, masters, dtype))
                each = [quick.call_function(operator.getitem, (together, i)) for i in range(len(some))]
            for node, copied in zip(some, each, strict=True):
                node.replace_all_uses_with(copied)
                quick.erase_node(node)


def _outputs_reached(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return from which outputs gradients come to each node: a number with a bit for each output."""
    places = {node: 1 << i for i, node in enumerate(dict.fromkeys(graph.output_node().all_input_nodes))}
    reached: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        readers = list(node.users)
        if op_name(node).partition(".")[0].endswith("_"):  # it writes into what it reads, for later readers
            readers += [user for user in node.all_input_nodes[0].users if node < user]
        bits = reduce(operator.or_, (reached.get(user, 0) for user in readers), places.get(node, 0))
        reached[node] = 0 if _stops_gradients(node) else bits
    return reached


def _stops_gradients(node: fx.Node) -> bool:
    is_region = op_name(node) == "wrap_with_set_grad_enabled"
    return op_name(node).partition(".")[0] == "detach" or (is_region and node.args[0] is False)


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
