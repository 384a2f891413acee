"""Run a captured graph in float32, segment by segment, and project its gradient or its output on random directions.

A gradient, or a change of it, has the mean square projection on random directions of ±1 as its squared length (M. F.
Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines", 1989). Only
what passes between segments is kept; the rest is computed again when its segment's turn comes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autocastfx.capture.call import Call
from autocastfx.capture.measure import copies_of_written, written_outside
from autocastfx.graph.alias import alias_sets, reachable
from autocastfx.graph.node import Use
from autocastfx.numerics.flat_graph import FlatGraph
from autocastfx.numerics.segments import Receivers, Segment, SegmentRun, segments_of

Project = Callable[[int, Receivers], None]
_Key = TypeVar("_Key")
_BETWEEN = torch.bfloat16  # of tangents and derivatives kept between segments: an estimate needs no more
_STEP = 1_000_003  # between the seeds of two tensors: torch's generator has 32 bits
_Values = dict[fx.Node, torch.Tensor]


def directions(like: Mapping[int, torch.Tensor], seed: int) -> dict[int, torch.Tensor]:
    """Return random float32 tensors of ±1, of the shapes and devices of ``like``; the same for a key and a seed."""
    return {key: signs(tensor, seed + _STEP * key) for key, tensor in like.items()}


def signs(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random float32 tensor of ±1, of the shape and device of ``like``."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8, device="cpu")
    return bits.mul_(2).sub_(1).to(like.device, torch.float32)


class ProbeRun:
    """One call of a captured graph. The caller's tensors get no gradients and are not written into.

    Attributes:
        parameters: the caller's, of which gradients are wanted, by target, with a number that tied ones share.
        gradients: of the loss by the parameters, by number, once :meth:`differentiate` has run.
        largest: the largest absolute value among all gradients, likewise.
    """

    def __init__(
        self,
        flat: FlatGraph,
        call: Call,
        stays_float32: Callable[[fx.Node, Use], bool],
        segments: tuple[Segment, ...] | None = None,
        kept: float = 1.0,
        passed: float = 0.0,
    ) -> None:
        """Run ``call``, in as many segments as need the least memory, if none are given.

        ``stays_float32`` is as for :class:`SegmentRun`, ``kept`` and ``passed`` are as for :func:`segments_of`.
        """
        tensors = {name: value for name, value in flat.held.items() if isinstance(value, torch.Tensor)}
        written = written_outside(flat.graph, flat.held)
        numbers: dict[int, int] = {}
        self.flat, self._stays_float32, self._shared = flat, stays_float32, alias_sets(flat.graph)
        self.segments = segments or segments_of(flat.graph, self._shared, kept, passed)
        self.parameters = {
            name: (numbers.setdefault(id(tensor), len(numbers)), tensor)
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and name not in written
        }
        self.gradients: dict[int, torch.Tensor] = {}
        self.largest = 0.0
        # what depends on a parameter is carried from segment to segment; all else is given
        roots = [n for n in flat.graph.nodes if n.op == "get_attr" and str(n.target) in self.parameters]
        self._carried = set(reachable(roots, lambda node: node.users))
        self._outside: dict[fx.Node, Any] = {}
        self._before: list[dict[fx.Node, Any]] = []
        self._returned: _Values | None = None
        self._held: tuple[int, SegmentRun] | None = None
        # the call's tensors and the model's, copied where the graph writes into them
        names = [node.name for node in flat.graph.nodes if node.op == "placeholder"]
        inputs = dict(zip(names, call.tensors, strict=True))
        own = {name: one.detach() for name, one in inputs.items() if isinstance(one, torch.Tensor)}
        given = {**inputs, **own, **copies_of_written(own, written)}
        buffers = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        attributes = {**flat.held, **copies_of_written(tensors, written | buffers)}
        for node in flat.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._outside[node] = given[node.name] if node.op == "placeholder" else attributes[str(node.target)]
        for i, segment in enumerate(self.segments):
            written_here = [n for n in segment.reads if n in self._shared and not n.op.startswith("call_")]
            read = {node: self._outside[node] for node in written_here} if len(self.segments) > 1 else {}
            self._before.append(_copies(read))
            self._drop()
            self._last = self._started(i, self._outside)
            for node in segment.gives:
                made = self._last.values[node]
                self._outside[node] = made.detach() if isinstance(made, torch.Tensor) else made
            if i < len(self.segments) - 1:
                self._held = (i, self._last)

    @property
    def output(self) -> Any:
        """The graph's output, flat."""
        return self._last.output

    def _drop(self) -> None:
        if self._held is not None:
            self._held[1].close()
        self._held = None

    def _started(self, i: int, outside: Mapping[fx.Node, Any]) -> SegmentRun:
        piece = SegmentRun(self.flat, self._stays_float32, self._shared)
        # The same numbers each time. torch.manual_seed takes half a millisecond, for devices that are not there too.
        (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(i)
        piece.run(self.segments[i], outside, self.parameters)
        return piece

    def _segment(self, i: int) -> SegmentRun:
        """Return the run of a segment: the one that is held, or a new one, with gradients if there are any."""
        if i == len(self.segments) - 1:
            return self._last
        if self._held is None or self._held[0] != i:
            self._drop()
            self._held = (i, self._started(i, {**self._outside, **_copies(self._before[i])}))
        piece = self._held[1]
        if self._returned is not None and not piece.is_differentiated:
            given = {node: self._returned[node] for node in self.segments[i].gives if node in self._returned}
            piece.first_pass(given, self._carried)
        return piece

    def differentiate(self, loss: torch.Tensor) -> None:
        """Find the gradients of ``loss``, computed from the output, by the parameters that it depends on."""
        self._returned = {}
        self._last.first_pass({}, self._carried, loss)
        for i in reversed(range(len(self.segments))):
            piece = self._segment(i)
            _add_to(self._returned, piece.to_inputs)
            _add_to(self.gradients, piece.to_parameters)
            self.largest = max(self.largest, *map(_largest, piece.returned.values()), 0.0)
        self.largest = max(self.largest, *map(_largest, self.gradients.values()), 0.0)

    def projections(
        self, seeds: Sequence[int], results: Sequence[torch.Tensor] = ()
    ) -> Iterator[tuple[SegmentRun, Project]]:
        """Project the gradients found, or ``results`` of the output, on a direction for each seed, and derive that.

        Yields:
            Each segment's run, the last segment first, with a function that hands out the derivatives of the projection
            of a number. It must be called once for each number, in order, before the next segment is asked for.
        """
        tangents = self._tangents(seeds)
        derivatives: list[_Values] = [{} for _ in seeds]
        for i in reversed(range(len(self.segments))):
            piece, gives = self._segment(i), self.segments[i].gives

            def project(number: int, taken: Receivers) -> None:
                later, seed = derivatives[number], seeds[number]
                roots = [(piece.values[node], later.pop(node)) for node in gives if node in later]  # noqa: B023
                if piece is self._last:  # noqa: B023
                    given = directions(dict(enumerate(results)), seed)
                    roots += [(result, given[k]) for k, result in enumerate(results)]
                by = directions(piece.to_parameters, seed)  # noqa: B023
                again = number + 1 < len(seeds)
                for node, one in piece.second_pass(roots, tangents[number], by, taken, again=again).items():  # noqa: B023
                    later[node] = _kept(later[node] + one if node in later else one)

            yield piece, project
            self._release(gives, tangents)
        self._drop()

    def _tangents(self, seeds: Sequence[int]) -> list[_Values]:
        """The tangents of the values between segments in each direction."""
        all_tangents: list[_Values] = [{} for _ in seeds]
        for i in range(len(self.segments) - 1) if self._returned is not None else ():
            piece = self._segment(i)
            for tangents, seed in zip(all_tangents, seeds, strict=True):
                made = piece.tangents(tangents, directions(piece.to_parameters, seed))
                tangents.update({node: _kept(tangent) for node, tangent in made.items()})
        return all_tangents

    def _release(self, nodes: Iterable[fx.Node], tangents: Iterable[_Values]) -> None:
        """Free what is held for values that only later segments read, which are done."""
        for values in (self._outside, self._returned or {}, *tangents):
            for node in nodes:
                values.pop(node, None)

    def close(self) -> None:
        """Free all values."""
        self._drop()
        self._last.close()
        self._outside.clear()


def _copies(values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Copies of what inputs and attributes hold, which share their storages likewise."""
    return dict(zip(values, copy.deepcopy(list(values.values())), strict=True))


def _kept(derivative: torch.Tensor) -> torch.Tensor:
    return derivative.to(_BETWEEN) if derivative.dtype == torch.float32 else derivative


def _add_to(sums: dict[_Key, torch.Tensor], more: Mapping[_Key, torch.Tensor]) -> None:
    for key, one in more.items():
        sums[key] = sums[key] + one.detach() if key in sums else one.detach()


def _largest(gradient: torch.Tensor) -> float:
    return float(gradient.detach().abs().max()) if gradient.numel() else 0.0
