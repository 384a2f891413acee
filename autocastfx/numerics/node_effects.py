"""Measure, on one batch, what each node in 16 bits does to a model's output or to its gradient."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autocastfx.errors import SensitivityError
from autocastfx.graph.node import is_float32, module_path
from autocastfx.graph.op_name import op_name
from autocastfx.numerics.probe_run import ProbeRun, Read, Taken
from autocastfx.numerics.replay import KernelError, Replay, rounding
from autocastfx.plan.sensitivity import OUTPUT, Effect, Signature

__all__ = ["NodeEffects", "directions", "gradient_scale"]

_Sums = dict[tuple[str, str], torch.Tensor]


def directions(like: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return random float32 tensors of ±1, of the shapes and devices of ``like``; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 2, t.shape, generator=generator).float() * 2 - 1).to(t.device) for t in like]


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
        seeds: one for each random projection.
        unmeasured: names of nodes that could not be measured, with the reason.
    """

    run: ProbeRun
    replay: Replay
    mode: str
    seeds: Sequence[int]
    unmeasured: dict[str, str] = field(default_factory=dict[str, str])
    _kernels: dict[fx.Node, KernelError] = field(default_factory=dict[fx.Node, KernelError])
    _returned: dict[tuple[fx.Node, int], torch.Tensor] = field(default_factory=dict[tuple[fx.Node, int], torch.Tensor])
    _sums: dict[fx.Node, _Sums] = field(default_factory=lambda: defaultdict(dict))

    def of_gradient(self, loss: torch.Tensor) -> tuple[Effect, ...]:
        """Measure the effects on the gradient of ``loss`` by all parameters.

        Raises:
            SensitivityError: the gradient is zero or not finite, or an op cannot be differentiated twice.
        """
        at_values: dict[fx.Node, dict[int, torch.Tensor]] = defaultdict(dict)

        def at_value(node: fx.Node, number: int, gradient: torch.Tensor) -> None:
            at_values[node][number] = gradient

        def at_read(read: Read, gradient: torch.Tensor) -> None:
            self._returned[read.node, read.place] = gradient

        results = self.run.first_pass(loss, Taken(value=at_value, read=at_read))
        norm = _norm(results, "gradient")
        largest = max(float(g.detach().abs().max()) for g in (*results, *self._returned.values()) if g.numel())
        self.replay = Replay(self.replay.ports, self.replay.low, gradient_scale(largest, self.replay.low))
        self._replay_all(at_values)
        rows: list[dict[fx.Node, _Sums]] = []
        for last, seed in _with_last(self.seeds):
            taken = Taken(value=self._at_value, read=self._at_read, tangent=self._at_tangent)
            self._sums = defaultdict(dict)
            try:
                self.run.pass_from(results, directions(results, seed), taken, again=not last)
            except RuntimeError as error:  # "derivative for aten::... is not implemented"
                said = next(iter(str(error).splitlines()), "")
                raise SensitivityError(
                    f"the gradient cannot be differentiated again: {said}. Measure of='output', which needs one "
                    "backward pass alone."
                ) from error
            rows.append(self._sums)
        return self._effects(rows, norm)

    def of_output(self) -> tuple[Effect, ...]:
        """Measure the effects on the model's floating-point outputs, as one vector.

        Raises:
            SensitivityError: there is none, or it is zero or not finite.
        """
        results = [t for t in pytree.tree_leaves(self.run.output) if isinstance(t, torch.Tensor)]
        results = [t for t in results if t.is_floating_point()]
        norm = _norm(results, "output")
        self._replay_all({})
        rows: list[dict[fx.Node, _Sums]] = []
        for last, seed in _with_last(self.seeds):
            self._sums = defaultdict(dict)
            taken = Taken(value=self._at_value, read=self._at_read)
            self.run.pass_from(results, directions(results, seed), taken, again=not last)
            rows.append(self._sums)
        return self._effects(rows, norm)

    def _replay_all(self, at_values: dict[fx.Node, dict[int, torch.Tensor]]) -> None:
        for node, reads in self.run.reads.items():
            if not reads or node in self.run.unmeasured or not _gives_float32(self.run.values.get(node)):
                continue
            if not isinstance(node.target, OpOverload):
                continue
            known = at_values.pop(node, {})
            gradients = [known.get(number) for number in range(max(known, default=-1) + 1)]
            try:
                self._kernels[node] = self.replay(node, self.run.values.__getitem__, reads, gradients)
            except (RuntimeError, NotImplementedError, TypeError) as error:  # there is no 16-bit kernel
                said = next(iter(str(error).splitlines()), "")
                self.unmeasured[self.run.flat.names[node]] = f"its kernel in 16 bits raises: {said}"
        for node, why in self.run.unmeasured.items():
            if _gives_float32(self.run.values.get(node)):
                self.unmeasured[self.run.flat.names[node]] = why

    def _at_value(self, node: fx.Node, number: int, adjoint: torch.Tensor) -> None:
        kernel = self._kernels.get(node)
        if kernel is not None and number < len(kernel.values) and (changed := kernel.values[number]) is not None:
            self._add(node, "computes", "", adjoint, changed)

    def _at_read(self, read: Read, adjoint: torch.Tensor) -> None:
        if read.node in self._kernels and not self.replay.ports.stays_float32(read.node, read.use):
            changed = rounding(self.run.values[read.use.node].detach(), self.replay.low)
            self._add(read.node, "reads", self.run.flat.names[read.use.node], adjoint, changed)

    def _at_tangent(self, read: Read, tangent: torch.Tensor) -> None:
        kernel = self._kernels.get(read.node)
        if kernel is not None and (changed := kernel.gradients[read.place]) is not None:
            self._add(read.node, "computes", "", tangent, changed)
        if (returned := self._returned.get((read.node, read.place))) is not None:
            changed = rounding(returned, self.replay.low, self.replay.scale)
            self._add(read.node, "returns", self.run.flat.names[read.use.node], tangent, changed)

    def _add(self, node: fx.Node, what: str, name: str, by: torch.Tensor, changed: torch.Tensor) -> None:
        """Add a first-order effect: the gradient by a tensor, times the change of that tensor."""
        effect = torch.dot(by.reshape(-1), changed.reshape(-1).to(by.dtype))
        sums = self._sums[node]
        sums[what, name] = sums[what, name] + effect if (what, name) in sums else effect

    def _effects(self, rows: list[dict[fx.Node, _Sums]], norm: float) -> tuple[Effect, ...]:
        most = torch.finfo(self.replay.low).max
        found: list[Effect] = []
        for node in self.run.reads:
            is_output = node.op == "output"
            if not (is_output or node in self._kernels):
                continue
            keys = dict.fromkeys(key for row in rows for key in row.get(node, ()))
            zero = torch.zeros(())
            columns = {key: tuple(float(row.get(node, {}).get(key, zero)) / norm for row in rows) for key in keys}
            overflows = not is_output and any(_is_beyond(self.run.values[n], most) for n in _read_or_made(node))
            found.append(_effect(self.mode, node, self.run.flat.names, columns, len(self.seeds), overflows=overflows))
        return tuple(found)


def _with_last(seeds: Sequence[int]) -> Iterator[tuple[bool, int]]:
    return ((i == len(seeds) - 1, seed) for i, seed in enumerate(seeds))


def _effect(
    mode: str,
    node: fx.Node,
    names: Mapping[fx.Node, str],
    columns: Mapping[tuple[str, str], Signature],
    probes: int,
    *,
    overflows: bool,
) -> Effect:
    key = (OUTPUT, OUTPUT, "") if node.op == "output" else (names[node], op_name(node), module_path(node))
    named = {what: {n: c for (w, n), c in columns.items() if w == what} for what in ("reads", "returns")}
    return Effect(mode, *key, columns.get(("computes", ""), (0.0,) * probes), **named, overflows=overflows)


def _read_or_made(node: fx.Node) -> list[fx.Node]:
    return [node, *(read for read in node.all_input_nodes if is_float32(read))]


def _gives_float32(value: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in pytree.tree_leaves(value))


def _is_beyond(value: Any, most: float) -> bool:
    """True if a finite number of float32 is larger than ``most``."""
    tensors = [t.detach() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    tensors = [t for t in tensors if t.dtype == torch.float32 and t.numel()]
    return any(bool(((t.abs() > most) & t.isfinite()).any()) for t in tensors)


def _norm(results: list[torch.Tensor], what: str) -> float:
    norm = math.sqrt(sum(float(t.detach().double().square().sum()) for t in results))
    if not math.isfinite(norm):
        raise SensitivityError(f"the {what} of a batch is not finite in float32: leave the batch out.")
    if norm == 0:
        raise SensitivityError(
            f"the {what} of a batch is zero, so that no error can be measured against it: give a batch and a loss "
            "whose gradient is not, and unfreeze the parameters that are trained."
        )
    return norm
