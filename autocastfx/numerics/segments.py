"""Divide a graph into segments that can be run again one at a time, so that not all values are held at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from autocastfx.graph.alias import moves
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import Use, elements, is_float32, tensors, uses, value
from autocastfx.numerics.flat_graph import FlatGraph

# Differentiate with torch so that the derivatives can be differentiated again, and again in float32.


class NotDifferentiableError(RuntimeError):
    """An op has no derivative of its derivative."""


@contextmanager
def derivable() -> Generator[None]:
    """While open, torch runs in float32, with gradients, and takes kernels whose gradients can be differentiated.

    Attention takes its formula, and recurrent layers no cuDNN.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C._DisableAutocast(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield


@contextmanager
def _differentiating() -> Generator[None]:
    """Raise what torch raises of an op without a derivative, or a custom op's that computes into out=, in its words."""
    try:
        yield
    except RuntimeError as error:
        raise NotDifferentiableError(next(iter(str(error).splitlines()), "")) from error


def differentiated(
    weighed: Sequence[tuple[torch.Tensor, torch.Tensor]], by: Sequence[torch.Tensor], *, again: bool
) -> Sequence[torch.Tensor | None]:
    """Return the derivatives of tensors, each weighed with another, by tensors. They have none themselves.

    Raises:
        NotDifferentiableError: an op's derivative has none.
    """
    if not weighed or not by:
        return ()
    roots, given = zip(*weighed, strict=True)
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast(), _differentiating():
        return torch.autograd.grad(roots, by, given, retain_graph=again, allow_unused=True)


_MORE = 1.1  # times the least memory, for fewer segments: each runs several times
_CLOSE = 1.02  # limits of memory that are not told apart
_PLACES = 200  # looked at, where the least passes
# Float32 values held for each value inside a segment, about: itself and its gradient, what the second backward pass
# saves of both, and in bfloat16 what 16 bits change of both. Some are shared, as inputs are with outputs.
_INSIDE = 4


@dataclass(frozen=True)
class Segment:
    """Nodes that run one after the other.

    Attributes:
        nodes: without inputs and attributes of the graph.
        reads: nodes outside that they read, in order.
        gives: those among ``nodes`` that later ones read.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def segments_of(graph: fx.Graph, shared: Mapping[fx.Node, Any], kept: float, passed: float) -> tuple[Segment, ...]:
    """Divide a flat ``graph`` so that running it needs the least memory, or little more with fewer segments.

    A storage that is written into is not divided: ``shared`` has the values that share one. Of several segments, the
    last is the output alone, where it reads single tensors.

    ``kept`` float32 tensors are kept for each value that a segment gives, until the segment is done, and ``passed``
    further ones for a value that passes from earlier segments to the one that runs.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    if any(isinstance(node.target, HigherOrderOperator) for node in nodes):
        return whole(graph)  # which may write into anything
    best = _Places.of(nodes, shared, kept, passed).best_cuts()
    if not best:
        return whole(graph)
    parts = [nodes[a:b] for a, b in itertools.pairwise((0, *best, len(nodes)))]
    output = graph.output_node()
    if all(map(_passes, output.all_input_nodes)):
        parts.append([output])
    else:
        parts[-1].append(output)
    return tuple(map(_segment, parts))


def whole(graph: fx.Graph) -> tuple[Segment, ...]:
    """Return the graph as one segment."""
    return (_segment([node for node in graph.nodes if node.op.startswith("call_") or node.op == "output"]),)


def _segment(nodes: Sequence[fx.Node]) -> Segment:
    inside = set(nodes)
    reads = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside)
    gives = (node for node in nodes if any(user not in inside for user in node.users))
    return Segment(tuple(nodes), tuple(reads), tuple(gives))


@dataclass(frozen=True)
class _Places:
    """Where a graph may be cut. A cut at ``i`` is before node ``i``.

    Attributes:
        sizes: elements of all nodes before each node, and at the end of all.
        last: by node, the last that reads it.
        own: by node, the elements of its value.
        ends: the cuts to look at, with the start and the end of the graph.
        passing: the elements that pass each of ``ends``.
        kept, passed: as for :func:`segments_of`.
    """

    sizes: Sequence[int]
    last: Sequence[int]
    own: Sequence[int]
    ends: Sequence[int]
    passing: Sequence[float]
    kept: float
    passed: float

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], shared: Mapping[fx.Node, Any], kept: float, passed: float) -> _Places:
        at = {node: i for i, node in enumerate(nodes)}
        last = [max((at.get(user, len(nodes)) for user in node.users), default=i) for i, node in enumerate(nodes)]
        own = [elements(node) for node in nodes]
        changes: list[float] = [0.0] * (len(nodes) + 2)
        barred = [0] * (len(nodes) + 2)
        for i, node in enumerate(nodes):
            changes[i + 1] += own[i]
            changes[last[i] + 1] -= own[i]
            if node in shared or not _passes(node):
                barred[i + 1] += 1
                barred[last[i] + 1] -= 1
        passing = list(itertools.accumulate(changes))
        is_open = [not count for count in itertools.accumulate(barred)]
        near = (i for i in range(1, len(nodes)) if is_open[i] and passing[i] <= min(passing[i - 1 : i + 2]))
        ends = [0, *sorted(sorted(near, key=passing.__getitem__)[:_PLACES]), len(nodes)]
        made = (size if moves(node) else 0 for node, size in zip(nodes, own, strict=True))
        sizes = list(itertools.accumulate(made, initial=0))
        return cls(sizes, last, own, ends, [passing[i] for i in ends], kept, passed)

    def inside(self, j: int, k: int) -> float:
        """Estimate the elements held for the values between two of ``ends`` while their segment is differentiated."""
        return _INSIDE * (self.sizes[self.ends[k]] - self.sizes[self.ends[j]])

    def best_cuts(self) -> tuple[int, ...]:
        """Return the cuts that need the least memory, or little more where less passes them."""
        alive = self._alive()
        most = self.inside(0, len(self.ends) - 1)
        least = most / (2 * len(self.ends) ** 2)
        while most > _CLOSE * least:
            middle = math.sqrt(most * least)
            most, least = (most, middle) if self._cuts(middle, alive) is None else (middle, least)
        return self._cuts(_MORE * most, alive) or ()

    def _alive(self) -> list[list[int]]:
        """By each of ``ends``, the nodes before it that are read behind it."""
        return [[i for i in range(end) if self.last[i] >= end] for end in self.ends]

    def _cuts(self, most: float, alive: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Choose the cuts that the least elements pass, with at most ``most`` held at a time; None if there are none.

        What earlier segments give adds to the memory of each later one. So the best cuts up to a place are part of the
        best cuts up to any later one.
        """
        best = [(0.0, 0)]  # for each of ``ends``: the elements given before it, and the cut before it
        for k in range(1, len(self.ends)):
            least = (math.inf, 0)
            for j in reversed(range(k)):
                inside, before = self.inside(j, k), best[j][0]
                if inside > most:
                    break  # and from farther back still more
                if inside + self.kept * before + self.passed * self.passing[j] <= most:
                    given = sum(self.own[i] for i in alive[k] if i >= self.ends[j])
                    least = min(least, (before + given, j))
            best.append(least)
        if best[-1][0] == math.inf:
            return None
        cuts, k = list[int](), len(self.ends) - 1
        while k := best[k][1]:
            cuts.append(self.ends[k])
        return tuple(reversed(cuts))


def _passes(node: fx.Node) -> bool:
    """True if the node gives a single tensor or number."""
    return isinstance(value(node), (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)) and len(tensors(node)) <= 1


# Run some nodes of a captured graph in float32 with a tap on each value and each read, and differentiate them twice.
#
# The gradient's projection on a direction R is a number, φ = R·∂L/∂θ. Backward through φ gives, for every read of the
# graph, ∂φ/∂x (what a change of the value read does), and ∂φ/∂g (what a change of the gradient g that comes back from
# there does; it is the value's tangent in the direction R). A segment of the graph needs little from outside for it:
# the gradients g that come back from the segments behind, the tangents of the values it reads, and ∂φ/∂x of those it
# gives.

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Read:
    """A place where a node reads a float32 value: the number of the place among the node's float32 reads."""

    node: fx.Node
    place: int
    use: Use


@dataclass(frozen=True)
class Receivers:
    """The functions that the second backward pass calls with each derivative, as soon as it is complete.

    Attributes:
        value: a node and the number of its float32 tensor, and the derivative by it.
        read: a read, and the derivative by the value read there. It may return what is to be added to that.
        tangent: a read, and the derivative by the gradient that comes back from there.
    """

    value: Callable[[fx.Node, int, torch.Tensor], None] | None = None
    read: Callable[[Read, torch.Tensor], torch.Tensor | None] | None = None
    tangent: Callable[[Read, torch.Tensor], None] | None = None


@dataclass
class SegmentRun:
    """One run of a segment.

    Attributes:
        flat: the graph. Its ``no_grad`` regions run with gradients here, which stop at their ends in the first pass
            alone: a rounded value reaches the result whether or not gradients do.
        stays_float32: whether a read is never rounded: such reads of buffers have no taps (batch norm's statistics).
        shared: nodes that share a storage that is written into. They have no taps.
        values: what each node gave, and what was read from outside.
        reads: the taps on each node's reads, in order.
        inputs: leaves in place of the values of earlier segments.
        parameters: leaves in place of the parameters, by number; tied ones are one leaf.
        output: the graph's output, flat, if its node is in the segment.
        is_differentiated: whether the first pass is done.
        unmeasured: nodes without taps, with the reason.
        at_values: after the first pass: the gradient by each node's float32 tensors, by their number.
        returned: after the first pass: the gradient that comes back from each read.
        to_inputs, to_parameters: after the first pass: the gradients that come back to leaves.
    """

    flat: FlatGraph
    stays_float32: Callable[[fx.Node, Use], bool]
    shared: Mapping[fx.Node, Any]
    values: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    reads: dict[fx.Node, list[Read]] = field(default_factory=dict[fx.Node, list[Read]])
    inputs: dict[fx.Node, torch.Tensor] = field(default_factory=dict[fx.Node, torch.Tensor])
    parameters: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    output: Any = None
    is_differentiated: bool = False
    unmeasured: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    at_values: dict[fx.Node, dict[int, torch.Tensor]] = field(default_factory=dict[fx.Node, dict[int, torch.Tensor]])
    returned: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    to_inputs: dict[fx.Node, torch.Tensor] = field(default_factory=dict[fx.Node, torch.Tensor])
    to_parameters: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    _gives: tuple[fx.Node, ...] = ()
    _lifted: set[fx.Node] = field(default_factory=set[fx.Node])
    _leaves: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _given: dict[fx.Node, torch.Tensor] = field(default_factory=dict[fx.Node, torch.Tensor])
    _taken: Receivers = field(default_factory=Receivers)
    _is_first: bool = True

    def run(
        self, segment: Segment, outside: Mapping[fx.Node, Any], parameters: Mapping[str, tuple[int, torch.Tensor]]
    ) -> None:
        """Run the nodes of a segment on the values ``outside`` that it reads.

        ``parameters`` are the attributes that gradients are wanted of, by target, with a number each.
        """
        self._gives = segment.gives
        with derivable():
            for node in segment.reads:
                made = outside[node]
                if node.op.startswith("call_"):  # in an earlier segment
                    if isinstance(made, torch.Tensor) and _is_number(made):
                        self.inputs[node] = made = made.detach().requires_grad_()
                    self.values[node] = made
                    continue
                if node.op == "get_attr" and str(node.target) in parameters:
                    number, parameter = parameters[str(node.target)]
                    made = self.parameters.setdefault(number, parameter.detach().requires_grad_())
                    self._lifted.add(node)
                self.values[node] = self._known(node, made)
            self._leaves += self.parameters.values()
            for node in segment.nodes:
                if node.op == "output":
                    self.output = map_arg(node.args[0], self._tapped(node))
                else:
                    self.values[node] = self._known(node, self._computed(node))

    def _computed(self, node: fx.Node) -> Any:
        if node in self.shared or any(use.node in self.shared for use in uses(node)):
            self.unmeasured[node] = "it shares a storage that is written into"
        elif not isinstance(node.target, torch._ops.OpOverload) and op_name(node) != "getitem":
            self.unmeasured[node] = "it is not an operator of torch"
        take = self._tapped(node)
        args: Any = tuple(map_arg(argument, take) for argument in node.args)
        kwargs: Any = {name: map_arg(argument, take) for name, argument in node.kwargs.items()}
        regions = self.flat.regions.get(node, ())
        is_detach = base_name(op_name(node)) == "detach"
        stops = is_detach or any(_sets_grad(one) and not cast("Any", one).args[0] for one in regions)
        target = cast("Any", node.target)
        if target is torch.ops.aten.view.default and node not in self.shared:
            target = torch.ops.aten.reshape.default  # attention in its formula has other strides
        with ExitStack() as modes:
            for region in (region for region in regions if not _sets_grad(region)):
                modes.enter_context(region())
            if (made := tensors(node)) and not any(map(_is_number, made)):
                modes.enter_context(torch.no_grad())  # which an op that gives integers may insist on
            made = args[0] if is_detach else target(*args, **kwargs)
        return pytree.tree_map(self._stopped, made) if stops else made

    def _tapped(self, node: fx.Node) -> Callable[[fx.Node], Any]:
        """Return what gives ``node`` each value that it reads; of a float32 one a view of its own."""
        reads = self.reads[node] = list[Read]()
        places: Iterator[Use] = iter(uses(node))
        is_open = node not in self.shared and op_name(node) != "getitem"

        def take(read: fx.Node) -> Any:
            use, made = next(places), self.values[read]
            if read.op == "get_attr" and read not in self._lifted and self.stays_float32(node, use):
                return made.detach()
            if not is_open or read in self.shared or not is_float32(read) or not made.requires_grad:
                return made
            tap = made.view_as(made)
            one = Read(node, len(reads), use)
            reads.append(one)
            tap.register_hook(partial(self._at_read, one))
            return tap

        return take

    def _known(self, node: fx.Node, made: Any) -> Any:
        """Tap what a node gave. A float32 value without gradients becomes a leaf, so that its rounding counts too."""
        if node in self.shared:
            return made
        leaves, spec = pytree.tree_flatten(made)
        number = -1
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32:
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
        stops = isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
        return _Stop.apply(value, self) if stops else value

    def _at_value(self, node: fx.Node, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if self._is_first:
            self.at_values.setdefault(node, {})[number] = gradient.detach()
        elif self._taken.value is not None:
            self._taken.value(node, number, gradient.detach())

    def _at_read(self, read: Read, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # none comes back from here, as behind a detach
            return None
        if not self._is_first:
            added = self._taken.read(read, gradient.detach()) if self._taken.read is not None else None
            return None if added is None else gradient + added
        self.returned[read.node, read.place] = gradient.detach()
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

    def first_pass(
        self, gradients: Mapping[fx.Node, torch.Tensor], carried: set[fx.Node], loss: torch.Tensor | None = None
    ) -> None:
        """Run backwards to the leaves, by a way that can be differentiated again.

        ``gradients`` are by values of the segment, of what later segments do with them; ``loss`` is computed from the
        output, if its node is in the segment. No gradients go to inputs but those ``carried``, which depend on
        parameters.

        Raises:
            NotDifferentiableError: an op's gradient is computed in a way that has no derivative.
        """
        self.is_differentiated = True
        roots: list[torch.Tensor] = [] if loss is None else [loss]
        given: list[torch.Tensor | None] = [None] * len(roots)
        for node, gradient in gradients.items():
            if self.values[node].requires_grad:
                self._given[node] = gradient.detach().requires_grad_()
                roots.append(self.values[node])
                given.append(self._given[node])
        inputs = {node: leaf for node, leaf in self.inputs.items() if node in carried}
        wanted = [*inputs.values(), *self.parameters.values()]
        if not roots or not wanted:
            return
        with derivable(), _differentiating():
            derivatives = torch.autograd.grad(roots, wanted, cast("Any", given), create_graph=True, allow_unused=True)
        of_inputs, of_parameters = derivatives[: len(inputs)], derivatives[len(inputs) :]
        self.to_inputs = _known_of(inputs, of_inputs)
        self.to_parameters = _known_of(self.parameters, of_parameters)

    def tangents(
        self, of_inputs: Mapping[fx.Node, torch.Tensor], of_parameters: Mapping[int, torch.Tensor]
    ) -> dict[fx.Node, torch.Tensor]:
        """Return the tangents of the values that the segment gives, from those of what it reads and the direction."""
        self._taken, self._is_first = Receivers(), False
        pairs = self._projected(of_inputs, of_parameters)
        return _known_of(self._given, differentiated(pairs, list(self._given.values()), again=True))

    def second_pass(
        self,
        roots: Sequence[tuple[torch.Tensor, torch.Tensor]],
        of_inputs: Mapping[fx.Node, torch.Tensor],
        of_parameters: Mapping[int, torch.Tensor],
        taken: Receivers,
        *,
        again: bool,
    ) -> dict[fx.Node, torch.Tensor]:
        """Run backwards from the projection, and return its derivatives by the values that the segment reads.

        ``roots`` are values that the segment gives, with the derivatives of the projection by them; ``of_inputs`` are
        the tangents of those that it reads, and ``of_parameters`` is the direction. ``taken`` gets all derivatives.
        """
        self._taken, self._is_first = taken, False
        pairs = [(value, by.to(value.dtype)) for value, by in roots if value.requires_grad]
        pairs += self._projected(of_inputs, of_parameters)
        leaves = [*self.inputs.values(), *self._leaves, *self._given.values()]
        return _known_of(self.inputs, differentiated(pairs, leaves, again=again))  # the first leaves

    def forget(self) -> None:
        """Free what derivatives do not need."""
        self.at_values.clear()
        self.returned.clear()
        for node in self.values.keys() - set(self._gives):
            del self.values[node]

    def close(self) -> None:
        """Free all values: they hold hooks, and those the run."""
        self._taken, self.output = Receivers(), None
        by_key = self.values, self.inputs, self.parameters, self.at_values, self.returned, self._given
        for collection in (*by_key, self.to_inputs, self.to_parameters, self._leaves):
            collection.clear()

    def _projected(
        self, of_inputs: Mapping[fx.Node, torch.Tensor], of_parameters: Mapping[int, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [(g, of_inputs[node]) for node, g in self.to_inputs.items() if node in of_inputs]
        pairs += [(g, of_parameters[name]) for name, g in self.to_parameters.items()]
        return [(gradient, by.to(gradient.dtype)) for gradient, by in pairs if gradient.requires_grad]


def _known_of(keys: Iterable[_Key], derivatives: Sequence[torch.Tensor | None]) -> dict[_Key, torch.Tensor]:
    """The derivatives that there are."""
    return {key: one for key, one in zip(keys, derivatives, strict=False) if one is not None}


class _Stop(torch.autograd.Function):
    """Stops gradients in the first pass; lets the second one through."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, run: SegmentRun) -> torch.Tensor:
        ctx.run = run
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return (None if ctx.run._is_first else gradients[0]), None


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _sets_grad(region: Any) -> bool:
    return isinstance(region, partial) and region.func is torch.set_grad_enabled
