"""The current value of a loss scale, on the device of the losses, for one optimizer or several."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree

from autocastfx.dtypes import widened
from autocastfx.errors import LossScaleError
from autocastfx.training.loss_scale import HostCopy, LossScale, ScaleNumbers, ScaleState, is_capturing, moved


class LossScaler:
    """The current value of a loss scale. Give one to several optimizers, and they share it.

    The value stays on the device. The host reads it only when overflows since the last read may have brought it to the
    floor; on a GPU a copy was started before, so that the host seldom waits.

    The step of a single optimizer updates the scale. If several share it, ``update`` does, as with
    ``torch.amp.GradScaler``::

        loss_scaler.scale(loss).backward()  # for all optimizers; first.backward(loss) is for the first alone
        first.step()
        second.step()
        loss_scaler.update()
    """

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.rounds = Rounds()
        self._state: ScaleState | None = None
        self._initial: ScaleNumbers | None = None  # loaded before the device is known
        self._has_found = self._is_replayed = False  # a shared scale: since the last update; ever, from a CUDA graph
        self._left = rule.overflows_to_floor(rule.initial)  # from the last known scale, less the steps since
        self._copy = HostCopy()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("rule", "_state", "_initial", "_left")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rule"])  # the optimizers join again
        self.__dict__.update(state)

    def state(self, device: torch.device) -> ScaleState:
        """Return the state. It stays on the device of the first call, but moves from a CPU to an accelerator."""
        if self._state is None:
            self._state = self.rule.state(device)
            if self._initial is not None:
                self._state.fill(self._initial)
        elif device.type != "cpu" and self._state.scale.device.type == "cpu":
            self._state = self._state.to(device)
        return self._state

    def scale(self, losses: Losses, optimizer: Any = None) -> Losses:
        """Multiply losses, a tensor or a tree of tensors, by the scale, after widening 16-bit ones to float32.

        ``optimizer`` is the one that will step with their gradients; None: all that share the scale.
        """
        owners = tuple(self.rounds.optimizers) if optimizer is None else (optimizer,)
        if isinstance(losses, torch.Tensor):
            return self._times(losses, owners)
        return pytree.tree_map_only(torch.Tensor, lambda loss: self._times(loss, owners), losses)

    def _times(self, loss: torch.Tensor, owners: tuple[Any, ...]) -> torch.Tensor:
        if not self.rule.is_checked:
            return loss
        scale = self.state(loss.device).scale
        if scale.device != loss.device:
            scale = moved(scale, loss.device)
        scaled = widened(loss) * scale

        def note(_: object = None) -> None:
            for owner in owners:
                self.rounds.note_backward(owner)

        if scaled.requires_grad:  # noted at its backward pass: zero_grad() may come before it
            scaled.register_hook(note)
        else:
            note()
        return scaled

    def stepped(self, optimizer: Any, found_inf: torch.Tensor | None, known: bool | None) -> bool:
        """Note a step, and update the scale unless it is shared. True if the step overflowed at the floor.

        ``found_inf`` is 1 if the step was skipped, else 0, on any device; None if there were no gradients. ``known`` is
        the same if the host knows it already, else None.
        """
        self.rounds.note_step(optimizer)
        if found_inf is None:
            return False
        found_inf = found_inf.to(self.state(found_inf.device).scale.device)
        is_last = self._is_last(found_inf, known)
        if self.rounds.are_shared:
            overflow = self.state(found_inf.device).found  # in place: a graph that is replayed adds to it
            torch.maximum(overflow, found_inf, out=overflow)
            self._has_found, self._is_replayed = True, self._is_replayed or is_capturing([overflow])
        else:
            self._adjust(found_inf)
        return is_last

    def update(self) -> None:
        """Update a shared scale from the steps since the last update: grow, back off or count.

        Call it when every optimizer with gradients has stepped. An optimizer that shares with none does it by itself.

        Raises:
            LossScaleError: no optimizer has stepped.
        """
        if not self.rule.is_checked or not self.rounds.are_shared:
            return
        self.rounds.end(are_replayed=self._is_replayed)
        if self._state is not None and (self._has_found or self._is_replayed):
            self._adjust(self._state.found)
            self._state.found.zero_()
        self._has_found = False

    def _adjust(self, found_inf: torch.Tensor) -> None:
        state = self.state(found_inf.device)
        self.rule.adjust(state, found_inf)
        if not is_capturing([state.scale]):  # a captured graph cannot ask the host
            self._left -= 1
            if self._left <= _SOON or self._copy.event is not None:
                self._look(state.scale)

    def _look(self, scale: torch.Tensor) -> None:
        seen = self._copy.read(scale) if self._left <= 0 else self._copy.arrived()
        if seen is not None:
            self._left = self.rule.overflows_to_floor(seen.number) - seen.age
            if self._left <= 0 < seen.age:
                self._left = self.rule.overflows_to_floor(self._copy.read(scale).number)
        elif self._left <= _SOON:
            self._copy.start(scale)

    def _is_last(self, found_inf: torch.Tensor, known: bool | None) -> bool:
        """True if the step overflowed at the floor, where the scale cannot back off."""
        if self._left > 0 or is_capturing([found_inf]):
            return False
        overflowed = bool(found_inf.item()) if known is None else known
        return overflowed and int(self.state(found_inf.device).spare.item()) <= 1

    @property
    def value(self) -> float:
        """The scale of the next loss. Reading it waits for the device."""
        if self._state is None:
            return self._initial.scale if self._initial is not None else self.rule.initial
        return float(self._state.scale.item())

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and its counters as numbers. If the scale is shared, save after ``update``."""
        state = self.state(torch.device("cpu")) if self._state is None else self._state
        return {
            "scale": float(state.scale.item()),
            "good_steps": int(state.good_steps.item()),
            "spare": int(state.spare.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of a ``LossScaler`` or of a ``torch.amp.GradScaler``.

        A GradScaler's growth and backoff factors are not loaded: the rule has its own.

        Raises:
            LossScaleError: ``state`` is neither, or a run with this rule cannot have its scale; nothing is loaded.
        """
        self._initial = self.admit(state)
        self._has_found = False
        self.rounds.forget_gradients()
        self._left = self.rule.overflows_to_floor(self._initial.scale)
        self._copy = HostCopy()
        if self._state is not None:
            self._state.fill(self._initial)

    def admit(self, state: Mapping[str, Any]) -> ScaleNumbers:
        """Return the numbers that ``load_state_dict(state)`` would load. Changes nothing.

        Raises:
            LossScaleError: ``load_state_dict`` would refuse the state.
        """
        return self.rule.admit(ScaleNumbers.of(state, spare=self.rule.spare))


# Track the optimizers of a loss scale: scaled gradients, and steps since the scale's last update.


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
        """End the round: the scale is being updated, by steps that may come from a CUDA graph, unseen from here, if
        replayed.

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


Losses = TypeVar("Losses")
_SOON = 8  # overflows away from the floor, at which a copy of the scale is started
