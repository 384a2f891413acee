"""What an optimizer's step changes, kept to undo one."""

from __future__ import annotations

import copy
from types import TracebackType

import torch
from torch.optim import Optimizer

from autocastfx.training.masters import Masters

__all__ = ["Snapshot"]


class Snapshot:
    """The weights and the state of an optimizer as they are now. An exception in its ``with`` block puts them back."""

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
        """Put them back, the 16-bit parameters of masters too."""
        with torch.no_grad():
            for parameter, weight in self._weights:
                parameter.copy_(weight)
        self._masters.publish()
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
