"""Which optimizers of a loss scale have scaled gradients, and which have stepped since its last update."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from autocastfx.errors import LossScaleError

__all__ = ["Rounds"]


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
        self._scaled: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the round of the first of their gradients
        self._stepped: WeakSet[Any] = WeakSet()

    def join(self, optimizer: Any) -> None:
        """Serve ``optimizer`` too."""
        self.are_shared, self._is_used = self._is_used, True
        self.optimizers.add(optimizer)

    def note_backward(self, optimizer: Any) -> None:
        """A scaled loss begins to give gradients to ``optimizer``."""
        begun = self._scaled.get(optimizer)
        if begun is None or (begun != self._number and not optimizer.has_gradients()):
            self._scaled[optimizer] = self._number

    def note_step(self, optimizer: Any) -> None:
        """``optimizer`` has stepped."""
        self.drop(optimizer)
        if self.are_shared:
            self._stepped.add(optimizer)

    def drop(self, optimizer: Any) -> None:
        """The gradients of ``optimizer`` are used or gone."""
        self._scaled.pop(optimizer, None)

    def is_scaled(self, optimizer: Any) -> bool:
        """True if a scaled loss has gone backward since ``optimizer`` stepped or dropped its gradients."""
        return optimizer in self._scaled

    def check(self, optimizer: Any) -> None:
        """Refuse to unscale gradients that do not have this round's scale.

        Raises:
            LossScaleError: ``optimizer`` has stepped in this round, no loss was scaled for it, or one was in another
                round.
        """
        if optimizer in self._stepped:
            raise LossScaleError(
                "this optimizer has stepped since the last update of the scale that it shares: call "
                "loss_scaler.update() once all optimizers of the round have stepped."
            )
        if optimizer not in self._scaled:
            raise LossScaleError(
                "there are gradients, but no loss was scaled since the last step or zero_grad(): call "
                "optimizer.backward(loss), or optimizer.scale_loss(loss).backward(), in place of loss.backward(); "
                "for a loss of several optimizers that share a scale, loss_scaler.scale(loss).backward()."
            )
        if self._scaled[optimizer] != self._number:
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
        self._stepped = WeakSet()

    def forget_gradients(self) -> None:
        """Begin anew: whatever was scaled had another scale."""
        self._scaled = WeakKeyDictionary()
        self._stepped = WeakSet()
