"""Float32 masters of the 16-bit parameters of an optimizer, for models that were made ``.half()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from autocastfx.errors import LossScaleError
from autocastfx.gradients import local

__all__ = ["Masters"]

_KERNELS: Any = torch  # its stubs leave the foreach kernels out
_LOW = (torch.float16, torch.bfloat16)


class Masters:
    """The masters that an optimizer updates in place of a model's 16-bit parameters.

    As in Apex's ``FP16_Optimizer``: an update smaller than half a unit in the last place of a 16-bit weight would be
    lost in it, and is kept in the master.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.working: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self._versions: list[int] = []
        for group in optimizer.param_groups:
            self.adopt(group, optimizer)

    def __len__(self) -> int:
        return len(self.masters)

    def adopt(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        """Put masters in the place of the 16-bit parameters of ``group``; the optimizer's state of them is widened."""
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype in _LOW:
                master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
                group["params"][index] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = {k: _widened(v) for k, v in optimizer.state.pop(parameter).items()}
                self.working.append(parameter)
                self.masters.append(master)
                self._versions.append(parameter._version)

    def collect(self) -> None:
        """Move the gradients of the 16-bit parameters, as float32, to their masters, adding to what is there."""
        if not self.masters:
            return
        self._follow()
        pairs = [(m, w) for m, w in zip(self.masters, self.working, strict=True) if w.grad is not None]
        added = [(m, w) for m, w in pairs if m.grad is not None]
        for master, working in pairs:
            if master.grad is None:
                master.grad = cast("torch.Tensor", working.grad).float()
        if added:
            _KERNELS._foreach_add_([m.grad for m, _ in added], [cast("torch.Tensor", w.grad).float() for _, w in added])
        for _, working in pairs:
            working.grad = None

    def _follow(self) -> None:
        """Take over weights that were changed from outside: a checkpoint that was loaded, an average swapped in."""
        for index, (working, version) in enumerate(zip(self.working, self._versions, strict=True)):
            if working._version != version:
                with torch.no_grad():
                    self.masters[index].copy_(working)
                self._versions[index] = working._version

    def publish(self) -> None:
        """Copy the masters that are trained to the 16-bit parameters, rounding to nearest."""
        if not self.masters:
            return
        moved = [i for i, master in enumerate(self.masters) if master.requires_grad]
        if moved:
            with torch.no_grad():
                working, masters = ([local(kept[i]) for i in moved] for kept in (self.working, self.masters))
                _KERNELS._foreach_copy_(working, masters)
            for i in moved:
                self._versions[i] = self.working[i]._version

    def zero_grad(self) -> None:
        """Drop the gradients of both."""
        for tensor in (*self.working, *self.masters):
            tensor.grad = None

    def state(self) -> list[torch.Tensor]:
        """The masters' values, in the order of the groups."""
        return [m.detach() for m in self.masters]

    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Refuse what ``load`` cannot take.

        Raises:
            LossScaleError: the values are not those of these masters.
        """
        if [value.shape for value in values] != [master.shape for master in self.masters]:
            raise LossScaleError(
                f"the state holds {len(values)} masters of 16-bit parameters, this optimizer has {len(self.masters)}, "
                "or they differ in shape: give the model the dtypes that it was saved with."
            )

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Take over masters' values, and give their roundings to the 16-bit parameters."""
        with torch.no_grad():
            for index, (master, value) in enumerate(zip(self.masters, values, strict=True)):
                master.copy_(value)
                self.working[index].copy_(master)
                self._versions[index] = self.working[index]._version


def _widened(held: Any) -> Any:
    return held.float() if isinstance(held, torch.Tensor) and held.dtype in _LOW else held
