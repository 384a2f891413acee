"""Step a fused optimizer that decides on the device whether to skip the step."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["FusedStep"]

_TAKES_FOUND_INF = "_step_supports_amp_scaling"  # torch sets it on fused optimizers


class FusedStep:
    """Steps a fused optimizer, and tracks which parameters have optimizer state.

    A step that creates state must not be skipped on the device: the new state would stay, and SGD would use
    uninitialized memory as its momentum.
    """

    def __init__(self) -> None:
        self._warm: list[torch.Tensor] = []  # keeps them alive, so that their ids are not reused
        self._ids: set[int] = set()

    def decides(self, optimizer: Optimizer) -> bool:
        """True if ``optimizer`` takes ``found_inf`` and has all the state that its next step needs."""
        if not getattr(optimizer, _TAKES_FOUND_INF, False):
            return False
        groups = optimizer.param_groups
        if not all(group.get("fused", True) for group in groups):
            return False
        parameters = chain.from_iterable([group["params"] for group in groups])
        are_warm = self._ids.issuperset  # with a map it runs no Python frame per parameter
        return are_warm(map(id, parameters)) or are_warm(map(id, _with_gradients(optimizer)))

    def step(self, optimizer: Any, found_inf: torch.Tensor) -> Any:
        """Call ``optimizer.step()``, which changes nothing if ``found_inf`` is 1."""
        optimizer.found_inf = found_inf
        try:
            return optimizer.step()
        finally:
            del optimizer.found_inf

    def note(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped and was not skipped."""
        if hasattr(optimizer, _TAKES_FOUND_INF):
            self._add(_with_gradients(optimizer))

    def note_loaded(self, optimizer: Optimizer) -> None:
        """Note that a state was loaded into ``optimizer``."""
        self._warm, self._ids = [], set()
        self._add([p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state])

    def _add(self, parameters: list[torch.Tensor]) -> None:
        self._warm += [p for p in parameters if id(p) not in self._ids]
        self._ids.update(map(id, self._warm))


def _with_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
