"""Which optimizers of a loss scale have scaled gradients, and which have stepped since its last update."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from autocastfx.errors import LossScaleError

__all__ = ["Rounds"]


@dataclass
class _Scaled:
    """Gradients of scaled losses: the round of the first loss, and how often they began since the last one."""

    round: int
    starts: int = 0


class Rounds:
    """The optimizers that a scale serves. From one update of the scale to the next is a round.

    Attributes:
        optimizers: those that are alive.
        are_shared: whether there ever were two, so that rounds are ended by hand.
    """

    def __init__(self) -> None:
        self.optimizers: WeakSet[Any] = WeakSet()
        self.are_shared = self._is_used = False
        self._number = 0
        self._scaled: dict[int, _Scaled] = {}  # by the optimizer's id; a weak dictionary takes ten times as long
        self._stepped: set[int] = set()

    def join(self, optimizer: Any) -> None:
        """Serve ``optimizer`` too.

        Its first parameter that requires a gradient is watched: ``model.zero_grad()`` tells an optimizer nothing.
        """
        self.are_shared, self._is_used = self._is_used, True
        self.optimizers.add(optimizer)
        watched = next((p for p in optimizer.model_parameters() if p.requires_grad), None)
        weakref.finalize(optimizer, self._leave, id(optimizer))
        if watched is not None:
            weakref.finalize(optimizer, self._watch(watched, id(optimizer)).remove)

    def _leave(self, number: int) -> None:
        self._scaled.pop(number, None)
        self._stepped.discard(number)

    def _watch(self, parameter: torch.Tensor, number: int) -> torch.utils.hooks.RemovableHandle:
        def note(_: torch.Tensor) -> None:
            scaled = self._scaled.get(number) if parameter.grad is None else None
            if scaled is not None:
                scaled.starts += 1
                if scaled.starts > 1:  # those of the scaled loss were dropped, and here come others
                    del self._scaled[number]

        return parameter.register_hook(note)

    def note_backward(self, optimizer: Any) -> None:
        """A scaled loss begins to give gradients to ``optimizer``."""
        scaled = self._scaled.get(id(optimizer))
        if scaled is not None and scaled.round != self._number:
            scaled = scaled if any(p.grad is not None for p in optimizer.model_parameters()) else None
        if scaled is None:
            self._scaled[id(optimizer)] = _Scaled(self._number)
        else:
            scaled.starts = 0

    def note_step(self, optimizer: Any) -> None:
        """``optimizer`` has stepped."""
        self.drop(optimizer)
        if self.are_shared:
            self._stepped.add(id(optimizer))

    def drop(self, optimizer: Any) -> None:
        """The gradients of ``optimizer`` are used or gone."""
        self._scaled.pop(id(optimizer), None)

    def is_scaled(self, optimizer: Any) -> bool:
        """True if a scaled loss has gone backward since ``optimizer`` stepped or dropped its gradients."""
        return id(optimizer) in self._scaled

    def check(self, optimizer: Any) -> None:
        """Refuse to unscale gradients that do not have this round's scale.

        Raises:
            LossScaleError: ``optimizer`` has stepped in this round, no loss was scaled for it, or one was in another
                round.
        """
        if id(optimizer) in self._stepped:
            raise LossScaleError(
                "this optimizer has stepped since the last update of the scale that it shares: call "
                "loss_scaler.update() once all optimizers of the round have stepped."
            )
        if id(optimizer) not in self._scaled:
            raise LossScaleError(
                "there are gradients, but no loss was scaled since the last step or zero_grad(): call "
                "optimizer.backward(loss), or optimizer.scale_loss(loss).backward(), in place of loss.backward(); "
                "for a loss of several optimizers that share a scale, loss_scaler.scale(loss).backward()."
            )
        if self._scaled[id(optimizer)].round != self._number:
            raise LossScaleError(
                "the shared scale was updated while gradients were added up, so that they have two scales: call "
                "loss_scaler.update() only when each optimizer with scaled gradients has stepped, or zero_grad()."
            )

    def end(self) -> None:
        """The scale is updated.

        Raises:
            LossScaleError: no optimizer has stepped.
        """
        if not self._stepped:
            raise LossScaleError("no optimizer has stepped since the last update of the scale: call step() first.")
        self._number += 1
        self._stepped = set()

    def forget_gradients(self) -> None:
        """Begin anew: whatever was scaled had another scale."""
        self._scaled = {}
        self._stepped = set()
