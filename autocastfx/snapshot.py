"""What an optimizer's step changes, kept to undo one."""

from __future__ import annotations

import copy

import torch
from torch.optim import Optimizer

__all__ = ["Snapshot"]


class Snapshot:
    """The weights and the state of an optimizer as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: copy.deepcopy(held) for p, held in optimizer.state.items()}

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for parameter, weight in self._weights:
                parameter.copy_(weight)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
