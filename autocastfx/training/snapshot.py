"""Save what an optimizer's step changes, so that a failed step can be undone."""

from __future__ import annotations

import copy
from types import TracebackType

import torch
from torch.optim import Optimizer

from autocastfx.training.masters import Masters

__all__ = ["Snapshot"]


class Snapshot:
    """A copy of an optimizer's weights and state. An exception in its ``with`` block restores them."""

    def __init__(self, optimizer: Optimizer, masters: Masters) -> None:
        masters.follow()
        self._optimizer, self._masters = optimizer, masters
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: copy.deepcopy(held) for p, held in optimizer.state.items()}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, raised: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is not None:
            self.restore()

    def restore(self) -> None:
        """Restore weights, optimizer state, and the 16-bit parameters of masters."""
        with torch.no_grad():
            for parameter, weight in self._weights:
                parameter.copy_(weight)
        self._masters.publish()
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
