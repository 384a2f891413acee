"""Run both graphs of a paired run backwards, and yield each gradient of both as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autocastfx.errors import CalibrationError
from autocastfx.numerics.paired_run import PairedRun, floating
from autocastfx.numerics.tape import Backward, Edge, Tape

__all__ = ["Gradients", "Loss", "run_backwards"]

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a node, parameter or input in both graphs; empty if one graph has none.

    Attributes:
        name: the node's name in the plan, or the name of a parameter or an input of the call.
        is_leaf: True for a parameter or an input.
        low, full: the gradients in the converted graph, and in the captured one.
    """

    name: str
    is_leaf: bool
    low: tuple[torch.Tensor, ...]
    full: tuple[torch.Tensor, ...]


def run_backwards(run: PairedRun, loss: Loss | None, scale: float) -> Generator[Gradients]:
    """Run both graphs backwards side by side, after all steps of ``run``.

    Args:
        run: a run of both graphs, with gradients.
        loss: a function from the model's output to one number; None: the sum of its floating-point tensors, in float32.
        scale: the loss scale.

    Raises:
        CalibrationError: the loss does not depend on anything that requires a gradient.
        ValueError: ``loss`` does not return a single number.
    """
    low, full = (_Half(tape, start) for tape, start in zip(run.tapes, _starts(run, loss or _sum, scale), strict=True))
    leaves = _leaves(low.tape, full.tape)
    low.tape.keep(run.twins)
    full.tape.keep(run.twins.values())
    for node, twin in reversed(list(run.twins.items())):
        low.run_to(low.tape.ends[node])
        full.run_to(full.tape.ends[twin])
        yield from _complete(leaves, low, full)
        made = (half.tape.made.pop(here, ()) for half, here in ((low, node), (full, twin)))
        yield _pair(run.names[node], list(zip(*made, strict=False)), low, full)
    low.run_to(0)
    full.run_to(0)
    yield from _complete(leaves, low, full)


def _starts(run: PairedRun, loss: Loss, scale: float) -> list[Backward]:
    found: list[Backward] = []
    for output in run.outputs():
        with run.modes():
            value: Any = loss(output)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"loss gave {kind}: it must turn the model's output into one number, as a tensor.")
            value = value.float()
        if not value.requires_grad:
            raise CalibrationError(
                "the loss does not depend on anything that requires a gradient: unfreeze a parameter, or call "
                "requires_grad_() on an input of the call."
            )
        found.append(Backward(value, torch.full_like(value, scale)))
    return found


def _sum(output: Any) -> torch.Tensor:
    return sum((tensor.float().sum() for tensor in floating(output)), torch.zeros(()))


@dataclass
class _Half:
    """The backward pass of one graph."""

    tape: Tape
    backward: Backward

    def run_to(self, mark: int) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
            self.backward.run_to(mark)

    def has_passed(self, names: Sequence[str]) -> bool:
        """True if backward has passed every reader of the leaf with these names."""
        return self.backward.at <= min((self.tape.uses[name] for name in names if name in self.tape.uses), default=0)


def _leaves(low: Tape, full: Tape) -> dict[Edge, list[str]]:
    """Return the names of the leaves that both graphs have, by their edge in ``low``; tied parameters have several."""
    found: dict[Edge, list[str]] = {}
    for name, edge in low.leaves.items():
        if name in full.leaves:
            found.setdefault(edge, []).append(name)
    return found


def _complete(leaves: dict[Edge, list[str]], low: _Half, full: _Half) -> Iterator[Gradients]:
    """Yield the gradients of leaves that are complete, and free them."""
    for edge, names in list(leaves.items()):
        if low.has_passed(names) and full.has_passed(names):
            other = full.tape.leaves[names[0]]
            pair = _pair(names[0], [(edge, other)], low, full, is_leaf=True)
            low.backward.forget(edge)
            full.backward.forget(other)
            del leaves[edge]
            yield pair


def _pair(
    name: str, edges: list[tuple[Edge | None, Edge | None]], low: _Half, full: _Half, *, is_leaf: bool = False
) -> Gradients:
    pairs = [
        (low.backward.gradient(ours), full.backward.gradient(theirs))
        for ours, theirs in edges
        if ours is not None and theirs is not None
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Gradients(name, is_leaf, tuple(a for a, _ in known), tuple(b for _, b in known))
