"""Measure, on one batch, what each node in 16 bits does to a model's output or to its gradient."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autocastfx.errors import SensitivityError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_float32, module_path
from autocastfx.numerics.differentiate import NotDifferentiableError
from autocastfx.numerics.flat_graph import FlatGraph
from autocastfx.numerics.probe_run import ProbeRun, Project, signs
from autocastfx.numerics.replay import KernelError, Replay, Roundings
from autocastfx.numerics.segment_run import Read, SegmentRun, Taken
from autocastfx.numerics.switches import jumps, least_error
from autocastfx.plan.sensitivity import OUTPUT, Effect, Signature

__all__ = ["NodeEffects", "gradient_scale"]

_Sums = dict[tuple[str, str], torch.Tensor]
_Changes = dict[fx.Node, torch.Tensor]


def gradient_scale(largest: float, low: torch.dtype) -> float:
    """Return a loss scale: the largest power of two that leaves gradients a factor of 16 below ``low``'s range."""
    if low == torch.bfloat16 or not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** max(0, min(24, math.floor(math.log2(torch.finfo(low).max / 16 / largest))))


@dataclass
class NodeEffects:
    """The effects of one batch.

    Attributes:
        run: the batch, run in float32.
        replay: runs a node in 16 bits. Its scale is set here.
        mode: ``"train"`` or ``"eval"``.
        seeds: one for each random projection. If one is that of the projection before, the jumps of gradients have the
            opposite signs, to be told from what is smooth.
        jumped: for each node whose gradient jumped, by how much the converted model changes what it reads, over by how
            much that was changed to see jumps, squared. Set here.
        errors: of nodes whose gradient switches, by name: those of the converted model there.
        unmeasured: names of nodes that could not be measured, with the reason.
    """

    run: ProbeRun
    replay: Replay
    mode: str
    seeds: Sequence[int]
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    unmeasured: dict[str, str] = field(default_factory=dict[str, str])
    jumped: list[float] = field(default_factory=list[float])
    _kernels: dict[fx.Node, KernelError] = field(default_factory=dict[fx.Node, KernelError])
    _sums: dict[fx.Node, _Sums] = field(default_factory=lambda: defaultdict(dict))
    _read: _Changes = field(default_factory=dict[fx.Node, torch.Tensor])
    _returned: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _beyond: set[fx.Node] = field(default_factory=set[fx.Node])
    _jumps: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _tangents: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _seed: int = 0
    _sign: int = 1

    def of_gradient(self, loss: torch.Tensor) -> tuple[Effect, ...]:
        """Measure the effects on the gradient of ``loss`` by all parameters.

        Raises:
            SensitivityError: the gradient is zero or not finite, or an op cannot be differentiated twice.
        """
        taken = Taken(value=self._at_value, read=self._at_read, tangent=self._at_tangent)
        try:
            self.run.differentiate(loss)
            norm = _norm(self.run.gradients.values(), "gradient")
            self.replay = replace(self.replay, scale=gradient_scale(self.run.largest, self.replay.low))
            return self._effects(self.run.projections(self.seeds), taken, norm)
        except NotDifferentiableError as error:
            raise SensitivityError(
                f"the gradient cannot be differentiated again: {error}. Measure of='output', which needs one backward "
                "pass alone."
            ) from error

    def of_output(self) -> tuple[Effect, ...]:
        """Measure the effects on the model's floating-point outputs, as one vector.

        Raises:
            SensitivityError: there is none, or it is zero or not finite.
        """
        results = [t for t in pytree.tree_leaves(self.run.output) if isinstance(t, torch.Tensor)]
        results = [t for t in results if t.is_floating_point()]
        norm = _norm(results, "output")
        taken = Taken(value=self._at_value, read=self._at_read)
        return self._effects(self.run.projections(self.seeds, results), taken, norm)

    def _effects(self, pieces: Iterable[tuple[SegmentRun, Project]], taken: Taken, norm: float) -> tuple[Effect, ...]:
        found: list[tuple[Effect, ...]] = []
        for piece, project in pieces:
            self._jump_all(piece)
            self._replay_all(piece)
            self._round_all(piece)
            piece.forget()
            rows: list[dict[fx.Node, _Sums]] = []
            for number, seed in enumerate(self.seeds):
                self._sums, self._seed = defaultdict(dict), seed
                self._sign = -1 if number and seed == self.seeds[number - 1] else 1
                project(number, taken)
                self._tangents.clear()
                rows.append(self._sums)
            found.append(self._of_piece(piece, rows, norm))
            self._kernels, self._read, self._returned, self._jumps = {}, {}, {}, {}
        return tuple(effect for effects in reversed(found) for effect in effects)

    def _jump_all(self, piece: SegmentRun) -> None:
        switches, low = self.replay.ports.facts.switches, self.replay.low
        for node, reads in piece.reads.items():
            known = piece.at_values.get(node, {})
            if op_name(node) not in switches or not known or node in piece.unmeasured:
                continue
            # A list may leave it in float32, and a pass may have replaced it: then one rounding is what moves it.
            least = max(least_error(value, low) for value in _of_float32(piece.values[node]))
            converted = self.errors.get(self.run.flat.names[node])
            error = max(converted or 0.0, least)
            if error > 0:
                gradients = [known.get(number) for number in range(max(known) + 1)]
                found = jumps(self.replay, node, piece.values.__getitem__, reads, gradients, error)
                self.jumped.append(1.0 if converted is None else (converted / error) ** 2)
                self._jumps |= {(node, place): jump for place, jump in found.items()}

    def _replay_all(self, piece: SegmentRun) -> None:
        names = self.run.flat.names
        for node, reads in piece.reads.items():
            if not reads or node in piece.unmeasured or not _of_float32(piece.values.get(node)):
                continue
            if not isinstance(node.target, OpOverload):
                continue
            known = piece.at_values.pop(node, {})
            gradients = [known.get(number) for number in range(max(known, default=-1) + 1)]
            try:
                self._kernels[node] = self.replay(node, piece.values.__getitem__, reads, gradients)
            except (RuntimeError, NotImplementedError, TypeError) as error:  # there is no 16-bit kernel
                said = next(iter(str(error).splitlines()), "")
                self.unmeasured[names[node]] = f"its kernel in 16 bits raises: {said}"
        for node, why in piece.unmeasured.items():
            if _of_float32(piece.values.get(node)):
                self.unmeasured[names[node]] = why

    def _round_all(self, piece: SegmentRun) -> None:
        roundings, most = Roundings(self.replay.low), torch.finfo(self.replay.low).max
        for read in (read for reads in piece.reads.values() for read in reads):
            made = read.use.node
            if read.node in self._kernels and not self.replay.ports.stays_float32(read.node, read.use):
                self._read[made] = roundings(piece.values[made])
            if (returned := piece.returned.get((read.node, read.place))) is not None:
                self._returned[read.node, read.place] = roundings(returned, self.replay.scale)
        self._beyond = {node for node, value in piece.values.items() if _is_beyond(value, most)}

    def _at_value(self, node: fx.Node, number: int, adjoint: torch.Tensor) -> None:
        kernel = self._kernels.get(node)
        if kernel is not None and number < len(kernel.values) and (changed := kernel.values[number]) is not None:
            self._add(node, "computes", "", adjoint, changed)

    def _at_read(self, read: Read, adjoint: torch.Tensor) -> torch.Tensor | None:
        if read.node in self._kernels and not self.replay.ports.stays_float32(read.node, read.use):
            self._add(read.node, "reads", self.run.flat.names[read.use.node], adjoint, self._read[read.use.node])
        tangent = self._tangents.pop((read.node, read.place), None)
        if tangent is None:
            return None
        # As if it were one more projection, of signs of its own: the squares of both add up.
        jump = self._sign * self._jumps[read.node, read.place] * tangent
        return jump * signs(jump, self._seed + zlib.crc32(f"{self.run.flat.names[read.node]} {read.place}".encode()))

    def _at_tangent(self, read: Read, tangent: torch.Tensor) -> None:
        if (read.node, read.place) in self._jumps:
            self._tangents[read.node, read.place] = tangent
        kernel = self._kernels.get(read.node)
        if kernel is not None and (changed := kernel.gradients[read.place]) is not None:
            self._add(read.node, "computes", "", tangent, changed)
        if (changed := self._returned.get((read.node, read.place))) is not None:
            self._add(read.node, "returns", self.run.flat.names[read.use.node], tangent, changed)

    def _add(self, node: fx.Node, what: str, name: str, by: torch.Tensor, changed: torch.Tensor) -> None:
        """Add a first-order effect: the gradient by a tensor, times the change of that tensor."""
        if by.is_contiguous() and changed.is_contiguous():
            effect = torch.dot(by.view(-1), changed.view(-1).float())
        else:
            effect = (by * changed).sum()
        sums = self._sums[node]
        sums[what, name] = sums[what, name] + effect if (what, name) in sums else effect

    def _of_piece(self, piece: SegmentRun, rows: list[dict[fx.Node, _Sums]], norm: float) -> tuple[Effect, ...]:
        found: list[Effect] = []
        for node in piece.reads:
            is_output = node.op == "output"
            if not (is_output or node in self._kernels):
                continue
            keys = dict.fromkeys(key for row in rows for key in row.get(node, ()))
            zero = torch.zeros(())
            columns = {key: tuple(float(row.get(node, {}).get(key, zero)) / norm for row in rows) for key in keys}
            overflows = not is_output and any(n in self._beyond for n in _read_or_made(node))
            found.append(_effect(self.mode, node, self.run.flat, columns, len(self.seeds), overflows=overflows))
        return tuple(found)


def _effect(
    mode: str,
    node: fx.Node,
    flat: FlatGraph,
    columns: Mapping[tuple[str, str], Signature],
    probes: int,
    *,
    overflows: bool,
) -> Effect:
    op = flat.ops.get(node) or op_name(node)
    key = (OUTPUT, OUTPUT, "") if node.op == "output" else (flat.names[node], op, module_path(node))
    named = {what: {n: c for (w, n), c in columns.items() if w == what} for what in ("reads", "returns")}
    return Effect(mode, *key, columns.get(("computes", ""), (0.0,) * probes), **named, overflows=overflows)


def _read_or_made(node: fx.Node) -> list[fx.Node]:
    return [node, *(read for read in node.all_input_nodes if is_float32(read))]


def _of_float32(value: Any) -> list[torch.Tensor]:
    tensors = [t.detach() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.dtype == torch.float32]


def _is_beyond(value: Any, most: float) -> bool:
    """True if a finite number of float32 is larger than ``most``."""
    known = (t for t in _of_float32(value) if t.numel())
    return any(not (_is_within(t, most) or _is_within(t.nan_to_num(0.0, 0.0, 0.0), most)) for t in known)


def _is_within(tensor: torch.Tensor, most: float) -> bool:
    return all(-most <= float(end) <= most for end in tensor.aminmax())


def _norm(results: Iterable[torch.Tensor], what: str) -> float:
    norm = math.sqrt(sum(float(t.detach().double().square().sum()) for t in results))
    if not math.isfinite(norm):
        raise SensitivityError(f"the {what} of a batch is not finite in float32: leave the batch out.")
    if norm == 0:
        raise SensitivityError(
            f"the {what} of a batch is zero, so that no error can be measured against it: give a batch and a loss "
            "whose gradient is not, and unfreeze the parameters that are trained."
        )
    return norm
