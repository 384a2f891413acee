"""Run a captured graph in float32 with a tap on each value and each read, and differentiate its target twice.

The gradient's projection on a direction R is a number, φ = R·∂L/∂θ. One backward pass through φ gives, for every read
of the graph, ∂φ/∂x (what a change of the value read does), and ∂φ/∂g (what a change of the gradient that comes back
from there does; it is the value's tangent in the direction R). A change of the gradient as a vector then has the mean
square projection on random directions of ±1 as its squared length (M. F. Hutchinson, "A stochastic estimator of the
trace of the influence matrix", 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from autocastfx.capture.call import Call
from autocastfx.capture.measure import apart, written_outside
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import Use, is_float32, uses
from autocastfx.graph.op_name import base_name, op_name
from autocastfx.numerics.flat_graph import FlatGraph

__all__ = ["ProbeRun", "Read", "Taken", "twice_differentiable"]


@dataclass(frozen=True)
class Read:
    """A place where a node reads a float32 value: the number of the place among the node's float32 reads."""

    node: fx.Node
    place: int
    use: Use


@dataclass(frozen=True)
class Taken:
    """The functions that a backward pass calls with each gradient, as soon as it is complete. Each may be left out.

    Attributes:
        value: a node and the number of its float32 tensor, and the gradient by it.
        read: a read, and the gradient by the value read there.
        tangent: a read, and the gradient by the gradient that comes back from there.
    """

    value: Callable[[fx.Node, int, torch.Tensor], None] | None = None
    read: Callable[[Read, torch.Tensor], None] | None = None
    tangent: Callable[[Read, torch.Tensor], None] | None = None


@dataclass
class ProbeRun:
    """One call of a captured graph in float32.

    Attributes:
        flat: the graph. Its ``no_grad`` regions run with gradients here, which stop at their ends in the first pass
            alone: a rounded value reaches the result whether or not gradients do.
        stays_float32: whether a read is never rounded: such reads of buffers have no taps (batch norm's statistics).
        values: what each node gave.
        reads: the taps on each node's reads, in order.
        parameters: the leaves in place of the caller's parameters, by name; tied ones are one leaf.
        output: the graph's output, flat.
        unmeasured: the nodes without taps, for they share a storage that is written into, or hold a graph.
    """

    flat: FlatGraph
    stays_float32: Callable[[fx.Node, Use], bool]
    values: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    reads: dict[fx.Node, list[Read]] = field(default_factory=dict[fx.Node, list[Read]])
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    output: Any = None
    unmeasured: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    _leaves: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _taken: Taken = field(default_factory=Taken)
    _is_first: bool = True

    @classmethod
    def of(cls, flat: FlatGraph, call: Call, stays_float32: Callable[[fx.Node, Use], bool]) -> ProbeRun:
        """Run ``call``. The caller's tensors get no gradients and are not written into."""
        run = cls(flat, stays_float32)
        tensors = {name: held for name, held in flat.held.items() if isinstance(held, torch.Tensor)}
        written = written_outside(flat.graph, flat.held)
        buffers = {name for name, held in tensors.items() if not isinstance(held, nn.Parameter)}
        names = [node.name for node in flat.graph.nodes if node.op == "placeholder"]
        inputs = dict(zip(names, call.tensors, strict=True))
        held = {**flat.held, **apart(tensors, written | buffers)}
        leaves: dict[int, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and name not in written:
                held[name] = leaves.setdefault(id(tensor), tensor.detach().requires_grad_())
                run.parameters[name] = held[name]
        run._leaves = list(leaves.values())
        given = {**{n: t.detach() for n, t in inputs.items()}, **apart(inputs, written)}
        shared = alias_sets(flat.graph)
        with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableAutocast(), twice_differentiable():
            for node in flat.graph.nodes:
                run._node(node, given, held, shared)
        return run

    def _node(
        self, node: fx.Node, given: Mapping[str, Any], held: Mapping[str, Any], shared: Mapping[fx.Node, Any]
    ) -> None:
        if node.op == "output":
            self.output = map_arg(node.args[0], self._tapped(node, shared))
            return
        if node.op in ("placeholder", "get_attr"):
            made = given[node.name] if node.op == "placeholder" else held[str(node.target)]
        else:
            made = self._computed(node, shared)
        self.values[node] = self._known(node, made, node in shared)

    def _computed(self, node: fx.Node, shared: Mapping[fx.Node, Any]) -> Any:
        if node in shared or any(use.node in shared for use in uses(node)):
            self.unmeasured[node] = "it shares a storage that is written into"
        elif not isinstance(node.target, torch._ops.OpOverload) and op_name(node) != "getitem":
            self.unmeasured[node] = "it is not an operator of torch"
        take = self._tapped(node, shared)
        args: Any = tuple(map_arg(argument, take) for argument in node.args)
        kwargs: Any = {name: map_arg(argument, take) for name, argument in node.kwargs.items()}
        regions = self.flat.regions.get(node, ())
        stops = base_name(op_name(node)) == "detach" or any(map(_is_no_grad, regions))
        with ExitStack() as modes:
            for region in (region for region in regions if not _sets_grad(region)):
                modes.enter_context(region())
            if base_name(op_name(node)) == "detach":
                made = args[0]
            else:
                made = cast("Any", node.target)(*args, **kwargs)
        return pytree.tree_map(self._stopped, made) if stops else made

    def _tapped(self, node: fx.Node, shared: Mapping[fx.Node, Any]) -> Callable[[fx.Node], Any]:
        """Return what gives ``node`` each value that it reads; of a float32 one a view of its own."""
        found = self.reads[node] = list[Read]()
        places: Iterator[Use] = iter(uses(node))
        is_open = node not in shared and op_name(node) != "getitem"

        def take(read: fx.Node) -> Any:
            use, made = next(places), self.values[read]
            if read.op == "get_attr" and str(read.target) not in self.parameters and self.stays_float32(node, use):
                return made.detach()
            if not is_open or read in shared or not is_float32(read) or not made.requires_grad:
                return made
            tap = made.view_as(made)
            one = Read(node, len(found), use)
            found.append(one)
            tap.register_hook(partial(self._at_read, one))
            return tap

        return take

    def _known(self, node: fx.Node, made: Any, is_shared: bool) -> Any:
        """Tap what a node gave. A float32 value without gradients becomes a leaf, so that its rounding counts too."""
        leaves, spec = pytree.tree_flatten(made)
        number = -1
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32 or is_shared:
                continue
            number += 1
            if not leaf.requires_grad:
                leaves[i] = leaf = leaf.detach().requires_grad_()
                self._leaves.append(leaf)
            if node.op.startswith("call_") and op_name(node) != "getitem":
                # A view: the node's own backward may read what it gave, which a replay of the node has counted.
                leaves[i] = tap = leaf.view_as(leaf)
                tap.register_hook(partial(self._at_value, node, number))
        return pytree.tree_unflatten(leaves, spec)

    def _stopped(self, value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
        return _Stop.apply(value, self) if is_number else value

    def _at_value(self, node: fx.Node, number: int, gradient: torch.Tensor | None) -> None:
        if self._taken.value is not None and gradient is not None:
            self._taken.value(node, number, gradient.detach())

    def _at_read(self, read: Read, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # none comes back from here, as behind a detach
            return None
        if self._taken.read is not None:
            self._taken.read(read, gradient.detach())
        if not (self._is_first and torch.is_grad_enabled()):
            return None
        if gradient.requires_grad:
            tap = gradient.view_as(gradient)  # its own, for one gradient may go back to several values
        else:
            tap = gradient.detach().requires_grad_()
            self._leaves.append(tap)
        tap.register_hook(partial(self._at_tangent, read))
        return tap

    def _at_tangent(self, read: Read, tangent: torch.Tensor | None) -> None:
        if self._taken.tangent is not None and tangent is not None:
            self._taken.tangent(read, tangent.detach())

    def first_pass(self, loss: torch.Tensor, taken: Taken) -> list[torch.Tensor]:
        """Run backwards from ``loss``, and return the gradients of the parameters, which can be differentiated again.

        A parameter that the loss does not reach has a gradient of zeros.
        """
        self._taken, self._is_first = taken, True
        wanted = self._distinct()
        with torch.inference_mode(False), torch.enable_grad(), twice_differentiable():
            found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        given = cast("Sequence[torch.Tensor | None]", found)  # torch's types leave None out
        return [torch.zeros_like(p) if g is None else g for g, p in zip(given, wanted, strict=True)]

    def pass_from(
        self, results: Sequence[torch.Tensor], directions: Sequence[torch.Tensor], taken: Taken, *, again: bool
    ) -> None:
        """Run backwards from the projection of ``results`` on ``directions``; ``again``: another pass will follow."""
        self._taken, self._is_first = taken, False
        pairs = [(r, d) for r, d in zip(results, directions, strict=True) if r.requires_grad]
        if not pairs:
            return
        roots, given = zip(*pairs, strict=True)
        with torch.inference_mode(False), torch.no_grad(), twice_differentiable():
            torch.autograd.grad(roots, self._leaves, given, retain_graph=again, allow_unused=True)

    def _distinct(self) -> list[torch.Tensor]:
        return list({id(leaf): leaf for leaf in self.parameters.values()}.values())

    def close(self) -> None:
        """Free all values."""
        self._taken = Taken()
        for held in (self.values, self.reads, self.parameters, self._leaves):
            held.clear()
        self.output = None


class _Stop(torch.autograd.Function):
    """Stops gradients in the first pass; lets the second one through."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, run: ProbeRun) -> torch.Tensor:
        ctx.run = run
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return (None if ctx.run._is_first else gradients[0]), None


def _sets_grad(region: Any) -> bool:
    return isinstance(region, partial) and region.func is torch.set_grad_enabled


def _is_no_grad(region: Any) -> bool:
    return _sets_grad(region) and not region.args[0]


@contextmanager
def twice_differentiable() -> Generator[None]:
    """While open, torch takes kernels whose gradients can be differentiated: attention in its formula, no cuDNN RNN."""
    flags: Sequence[AbstractContextManager[Any]] = (
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    )
    with ExitStack() as stack:
        for flag in flags:
            stack.enter_context(flag)
        yield
