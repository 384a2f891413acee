"""Track the optimizers of a loss scale: scaled gradients, and steps since the scale's last update."""

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
    """Scaled gradients of an optimizer.

    Attributes:
        round: the round of the first scaled loss.
        starts: how often the watched parameter got a first gradient since the last scaled loss.
    """

    round: int
    starts: int = 0


class Rounds:
    """The optimizers that use a scale. A round lasts from one update of the scale to the next.

    Attributes:
        optimizers: those still alive.
        are_shared: True once a second optimizer has joined: then the user ends rounds with ``update``.
    """

    def __init__(self) -> None:
        self.optimizers: WeakSet[Any] = WeakSet()
        self.are_shared = self._is_used = False
        self._number = 0
        self._scaled: dict[int, _Scaled] = {}  # by the optimizer's id; a weak dictionary takes ten times as long
        self._stepped: set[int] = set()

    def join(self, optimizer: Any) -> None:
        """Add ``optimizer``, and watch its first parameter that requires a gradient.

        Watching notices that ``model.zero_grad()`` dropped the gradients, which the optimizer is not told.
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
                if scaled.starts > 1:  # the scaled gradients were dropped, and these are others
                    del self._scaled[number]

        return parameter.register_hook(note)

    def note_backward(self, optimizer: Any) -> None:
        """Note that the backward pass of a scaled loss begins for ``optimizer``."""
        scaled = self._scaled.get(id(optimizer))
        if scaled is not None and scaled.round != self._number:
            scaled = scaled if any(p.grad is not None for p in optimizer.model_parameters()) else None
        if scaled is None:
            self._scaled[id(optimizer)] = _Scaled(self._number)
        else:
            scaled.starts = 0

    def note_step(self, optimizer: Any) -> None:
        """Note that ``optimizer`` has stepped."""
        self.drop(optimizer)
        if self.are_shared:
            self._stepped.add(id(optimizer))

    def drop(self, optimizer: Any) -> None:
        """Note that the gradients of ``optimizer`` were used or dropped."""
        self._scaled.pop(id(optimizer), None)

    def is_scaled(self, optimizer: Any) -> bool:
        """True if a scaled loss has gone backward since ``optimizer`` stepped or dropped its gradients."""
        return id(optimizer) in self._scaled

    def check(self, optimizer: Any) -> None:
        """Refuse to unscale gradients that do not have this round's scale.

        Raises:
            LossScaleError: ``optimizer`` has stepped in this round, no loss was scaled for it, or a loss was scaled in
                another round.
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

    def end(self, *, are_replayed: bool) -> None:
        """End the round: the scale is being updated.

        Args:
            are_replayed: steps may come from a CUDA graph, unseen from here.

        Raises:
            LossScaleError: no optimizer has stepped.
        """
        if not self._stepped and not are_replayed:
            raise LossScaleError("no optimizer has stepped since the last update of the scale: call step() first.")
        self._number += 1
        self._stepped = set()

    def forget_gradients(self) -> None:
        """Forget scaled gradients and steps, because a new scale was loaded."""
        self._scaled = {}
        self._stepped = set()
