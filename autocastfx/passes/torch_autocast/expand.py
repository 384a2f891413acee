"""Composite ops that torch.autocast does not list, replaced by their parts where a part of theirs is listed.

torch.autocast decides inside such an op: an einsum on a CPU is a ``bmm``, a cross entropy on a GPU is a ``log_softmax``
and an ``nll_loss``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.graph.names import op_name
from autocastfx.graph.node import NodeRun, attribute, place_like, set_value, value
from autocastfx.graph.sizes import concrete_sizes, in_dtype_of
from autocastfx.passes.torch_autocast.dispatch import Dispatch
from autocastfx.policy.rule import Category

_COMPOSITE = "CompositeImplicitAutograd"


def expand(graph: fx.Graph, dispatch: Dispatch) -> fx.Graph:
    """A copy of ``graph`` in which every composite that holds a listed op stands as its parts.

    Args:
        graph: captured, with abstract values; it stays as it is.
        dispatch: what is listed, and the dtypes that values have under torch.autocast, on which parts depend.
    """
    run = _Run(dispatch, concrete_sizes(graph))
    for node in graph.nodes:
        run.copy(node)
    return run.graph


def _set_values(traced: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give the nodes of a trace the abstract values that other inputs lead to."""
    run = NodeRun(traced.graph, lambda n: attribute(traced, str(n.target)), lambda n, made, _: set_value(n, made))
    run.run(*inputs, enable_io_processing=False)


def _taken(node: fx.Node, results: Mapping[fx.Node, Any]) -> Any:
    """Return the member that ``node`` takes out of the results of parts; None if it does anything else."""
    if op_name(node) != "getitem":
        return None
    source, key = node.args[:2]
    members = results.get(cast("fx.Node", source))
    return members[cast("int", key)] if isinstance(members, (list, tuple)) else None


@dataclass
class _Run:
    dispatch: Dispatch
    concrete: Callable[[Any], Any]
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, Any] = field(default_factory=dict)  # a node of the source → its copy, or its parts' results
    values: dict[fx.Node, Any] = field(default_factory=dict)  # a copy → its abstract value under torch.autocast
    whole: set[tuple[Any, ...]] = field(default_factory=set)  # calls that are known to hold no listed op

    def copy(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph.output(map_arg(node.args[0], self._copied)).meta.update(node.meta)
            return
        taken = _taken(node, self.copies)
        self.copies[node] = self._expanded(self.graph.node_copy(node, self._copied)) if taken is None else taken

    def _copied(self, node: fx.Node) -> Any:
        return self.copies[node]

    def _expanded(self, node: fx.Node) -> Any:
        """``node``, just made, or the results of the parts that replace it."""
        if node.op != "call_function":
            self.values[node] = self.concrete(value(node))
            return node
        rule = self.dispatch.rule(node)
        if rule is None and self._is_composite(node):
            parts = self._parts(node)
            if parts is not None:
                return self._inline(node, parts)
        category = rule.category if rule is not None else Category.KEEP
        precision, _ = self.dispatch.decide(category, node, self.values)
        self.values[node] = self.dispatch.value(node, precision, self.values, self.concrete(value(node)))
        return node

    def _is_composite(self, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload) or not isinstance(value(node), (torch.Tensor, list, tuple)):
            return False
        name = node.target.name()
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        backend = {"meta": "Meta"}.get(self.dispatch.device, self.dispatch.device.upper())
        return has(name, _COMPOSITE) and not has(name, backend)

    def _parts(self, node: fx.Node) -> fx.GraphModule | None:
        """The composite's own calls, one level down; None if no listed op is among them or below them."""
        key = self._key(node)
        if key in self.whole:
            return None
        # The captured values, whose sizes are symbolic, in the dtypes that they have under torch.autocast.
        now = {read: in_dtype_of(value(read), self.values[read]) for read in node.all_input_nodes}
        traced = self._trace(node, now)
        if traced is None or not self._holds_listed(traced):
            self.whole.add(key)
            return None
        return traced

    def _key(self, node: fx.Node) -> tuple[Any, ...]:
        def described(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                abstract = self.values[leaf]
                return tuple((t.dtype, t.ndim) for t in pytree.tree_leaves(abstract) if isinstance(t, torch.Tensor))
            return repr(leaf)

        leaves = pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda leaf: isinstance(leaf, fx.Node))
        return (node.target, *(described(leaf) for leaf in leaves))

    def _trace(self, node: fx.Node, now: Mapping[fx.Node, Any]) -> fx.GraphModule | None:
        """The calls that the composite makes on the values ``now``, with abstract values; None if it cannot be traced.

        Some kernels refuse symbolic sizes: they are traced on those of the example, and the trace is run on the others.
        """
        reads = list(now)

        def call(*given: Any) -> Any:
            by_node = dict(zip(reads, given, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: by_node[n])
            with torch._C.DisableTorchFunction():  # else the operator itself is called again, not its kernel
                return cast("Any", node.target)._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

        current = [now[n] for n in reads]
        for values in (current, [value(n) for n in reads], [self.concrete(now[n]) for n in reads]):
            with self._as_called():
                try:
                    traced = make_fx(call, pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
                    traced.graph.eliminate_dead_code()
                    if values is not current:
                        _set_values(traced, current)
                except (
                    RuntimeError,
                    TypeError,
                    AssertionError,
                ):  # the last for a tensor that the kernel makes of a number
                    continue
            holds_constant = any(part.op == "get_attr" for part in traced.graph.nodes)
            return None if holds_constant else traced
        return None

    @contextmanager
    def _as_called(self) -> Generator[None, None, None]:
        """While open, operators run as torch.autocast runs them, so that mixed dtypes meet as they do in a model."""
        device = self.dispatch.device
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, dtype=self.dispatch.low))
            stack.enter_context(cast("Any", fx_config).patch(backed_size_oblivious=True))
            yield

    def _holds_listed(self, traced: fx.GraphModule) -> bool:
        for node in (n for n in traced.graph.nodes if n.op == "call_function"):
            if self.dispatch.rule(node) is not None:
                return True
            if self._is_composite(node):
                inner = self._trace(node, {read: value(read) for read in node.all_input_nodes})
                if inner is not None and self._holds_listed(inner):
                    return True
        return False

    def _inline(self, node: fx.Node, traced: fx.GraphModule) -> Any:
        reads = iter(node.all_input_nodes)
        inner: dict[fx.Node, Any] = {}
        made: set[fx.Node] = set()
        result: Any = None
        for part in traced.graph.nodes:
            if part.op == "placeholder":
                inner[part] = next(reads)
            elif part.op == "output":
                result = map_arg(part.args[0], lambda n: inner[n])
            else:
                if (taken := _taken(part, inner)) is not None:
                    inner[part] = taken
                    continue
                args, kwargs = map_arg((part.args, part.kwargs), lambda n: inner[n])
                name = f"{node.name}_{part.name}"
                copied = self.graph.create_node("call_function", part.target, args, kwargs, name=name)
                place_like(copied, node)
                set_value(copied, value(part))
                inner[part] = self._expanded(copied)
                made.add(copied)
        # The captured graph has these values; what it says of their dtypes is what a border or an output goes back to.
        leaves = pytree.tree_leaves(result)
        for leaf, captured in zip(leaves, pytree.tree_leaves(value(node)), strict=True):
            if leaf in made:
                set_value(leaf, captured)
        self.graph.erase_node(node)
        return result
