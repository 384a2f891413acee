"""A loss scale at work: its present value, on the device of the losses, for one optimizer or for several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree

from autocastfx.errors import LossScaleError
from autocastfx.host_copy import HostCopy, is_capturing
from autocastfx.loss_scale import LossScale, ScaleState

__all__ = ["LossScaler", "numbers_of"]

Losses = TypeVar("Losses")
_LOW = (torch.float16, torch.bfloat16)
_SOON = 8  # overflows away from the floor: then a copy of the scale is sent for


class LossScaler:
    """The present value of a loss scale. Give one to several optimizers, and they share it.

    The value stays on the device. The host looks at it only when overflows since it was last known may have brought it
    to the floor; on a GPU a copy is then under way already, so that the look seldom waits.

    With several optimizers the scale is adjusted once for each round: at the first loss after steps of all of them that
    scaled one.
    """

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self._state: ScaleState | None = None
        self._initial: Mapping[str, Any] | None = None  # loaded, until the device is known
        self._optimizers: WeakSet[Any] = WeakSet()
        self._pending: set[int] = set()  # ids of those that scaled a loss and have not stepped since
        self._found: torch.Tensor | None = None  # of the steps of this round, where several optimizers share the scale
        self._left = rule.overflows_to_floor(rule.initial)  # from the last known scale, less the steps since
        self._copy = HostCopy()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("rule", "_state", "_initial", "_left")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rule"])  # the optimizers join again
        self.__dict__.update(state)

    def join(self, optimizer: Any) -> None:
        """Serve ``optimizer`` too."""
        self._optimizers.add(optimizer)

    def state(self, device: torch.device) -> ScaleState:
        """The state, on the device that it was first asked for on; it leaves a CPU for another."""
        if self._state is None:
            self._state = self.rule.state(device)
            if self._initial is not None:
                self._restore(self._state, self._initial)
        elif device.type != "cpu" and self._state.scale.device.type == "cpu":
            self._state = self._state.to(device)
        return self._state

    def scale(self, losses: Losses, optimizer: Any) -> Losses:
        """``losses``, a tensor or a tree of tensors, times the scale; in float32 where they have 16 bits."""
        if self._found is not None:
            self._finish_round()
        self._pending.add(id(optimizer))
        if isinstance(losses, torch.Tensor):
            return self._times(losses)
        return pytree.tree_map_only(torch.Tensor, self._times, losses)

    def _times(self, loss: torch.Tensor) -> torch.Tensor:
        if not self.rule.is_checked:
            return loss
        scale = self.state(loss.device).scale
        if scale.device != loss.device:
            scale = scale.to(loss.device, non_blocking=True)
        return (loss.float() if loss.dtype in _LOW else loss) * scale

    @property
    def has_scaled(self) -> bool:
        """Whether a loss was scaled since the optimizers stepped."""
        return len(self._pending) > 0 or self._found is not None

    def stepped(self, optimizer: Any, found_inf: torch.Tensor, known: bool | None) -> bool:
        """Note a step: whether that overflow was one too many.

        Args:
            optimizer: that stepped.
            found_inf: 1 if the step was skipped, else 0; on any device.
            known: the same where the host knows it already.
        """
        self._pending.discard(id(optimizer))
        if len(self._optimizers) <= 1:
            return self._adjust(found_inf, known)
        found_inf = found_inf.to(self.state(found_inf.device).scale.device)
        self._found = found_inf if self._found is None else torch.maximum(self._found, found_inf)
        return self._is_last(found_inf, known)

    def _finish_round(self) -> None:
        self._pending.intersection_update(map(id, self._optimizers))  # one that is gone will not step
        if self._found is not None and not self._pending:
            found, self._found = self._found, None
            self._adjust(found, None)

    def _adjust(self, found_inf: torch.Tensor, known: bool | None) -> bool:
        state = self.state(found_inf.device)
        is_last = self._left <= 0 and self._is_last(found_inf, known)
        self.rule.adjust(state, found_inf.to(state.scale.device))
        if not is_capturing(state.scale):  # a captured graph cannot ask the host
            self._left -= 1
            if self._left <= _SOON or self._copy.event is not None:
                self._look(state.scale)
        return is_last

    def _look(self, scale: torch.Tensor) -> None:
        seen = self._copy.read(scale) if self._left <= 0 else self._copy.arrived()
        if seen is not None:
            self._left = self.rule.overflows_to_floor(seen.number) - seen.age
            if self._left <= 0 < seen.age:
                self._left = self.rule.overflows_to_floor(self._copy.read(scale).number)
        elif self._left <= _SOON:
            self._copy.start(scale)

    def _is_last(self, found_inf: torch.Tensor, known: bool | None) -> bool:
        """Whether the step overflowed at the floor, so that the scale can back off no more."""
        if self._left > 0 or is_capturing(found_inf):
            return False
        overflowed = bool(found_inf.item()) if known is None else known
        return overflowed and int(self.state(found_inf.device).spare.item()) <= 1

    @property
    def value(self) -> float:
        """The scale of the next loss. Reading it waits for the device."""
        self._finish_round()
        if self._state is None:
            return float(self._initial["scale"]) if self._initial is not None else self.rule.initial
        return float(self._state.scale.item())

    def state_dict(self) -> dict[str, float | int]:
        """Scale and counters, as numbers."""
        self._finish_round()
        state = self.state(torch.device("cpu")) if self._state is None else self._state
        return {
            "scale": float(state.scale.item()),
            "good_steps": int(state.good_steps.item()),
            "spare": int(state.spare.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, or that of a ``torch.amp.GradScaler``.

        A GradScaler's factors are not taken over: they are the rule's.

        Raises:
            LossScaleError: it is neither.
        """
        self._initial = numbers_of(state)
        self._pending.clear()
        self._found = None
        self._left = self.rule.overflows_to_floor(float(self._initial["scale"]))
        self._copy = HostCopy()
        if self._state is not None:
            self._restore(self._state, self._initial)

    @staticmethod
    def _restore(state: ScaleState, numbers: Mapping[str, Any]) -> None:
        for name, number in numbers.items():
            getattr(state, name).fill_(number)


def numbers_of(state: Mapping[str, Any]) -> dict[str, float | int]:
    """The numbers of a ``ScaleState`` in the state dict of a loss scale or of a ``torch.amp.GradScaler``.

    Raises:
        LossScaleError: it is neither.
    """
    found: dict[str, Any] = {
        "scale": state.get("scale"),
        "good_steps": state.get("good_steps", state.get("_growth_tracker")),
    }
    if any(number is None for number in found.values()):
        raise LossScaleError(
            "a loss scale's state has 'scale' and 'good_steps' (a GradScaler's '_growth_tracker'), this one has "
            f"{sorted(state)}: give it what LossScalingOptimizer.state_dict() or GradScaler.state_dict() gave."
        )
    return {**found, **({"spare": state["spare"]} if "spare" in state else {})}
