"""Float32 masters of an optimizer's 16-bit parameters, for models converted with ``.half()``."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from autocastfx.dtypes import LOW_DTYPES, widened
from autocastfx.errors import ArgumentError, LossScaleError
from autocastfx.training.copying_step import writing_copies
from autocastfx.training.gradients import local, settled


class Masters:
    """The masters that an optimizer updates in place of a model's 16-bit parameters, as in Apex's ``FP16_Optimizer``.

    The master keeps updates that are smaller than half a unit in the last place of the 16-bit weight; the weight itself
    would lose them.

    Once collected, a master and its parameter share one float32 gradient: code that reads, changes or drops the
    model's gradient does so to the optimizer's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.working: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self._marks: list[TensorMark | None] = []  # of the parameters when they last agreed with their masters
        self._shared: list[torch.Tensor | None] = []  # gradients
        self._written = set[int]()  # ids of masters whose parameters their step has written
        for group in optimizer.param_groups:
            self.adopt(group, optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {"working": self.working, "masters": self.masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._marks, self._shared = [None] * len(self), [None] * len(self)
        self._written = set[int]()

    def __len__(self) -> int:
        return len(self.masters)

    def adopt(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        """Replace the 16-bit parameters of ``group`` by masters, and widen their optimizer state."""
        known = {id(working): master for working, master in zip(self.working, self.masters, strict=True)}
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype in LOW_DTYPES:
                if id(parameter) not in known:
                    known[id(parameter)] = self._add(parameter)
                master = group["params"][index] = known[id(parameter)]
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[master] = {
                        key: widened(value) if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                    }

    def _add(self, parameter: torch.Tensor) -> torch.Tensor:
        master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        self.working.append(parameter)
        self.masters.append(master)
        self._marks.append(TensorMark(parameter))
        self._shared.append(None)
        return master

    def refuse_known(self, group: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Refuse a new group of ``optimizer`` with a parameter that has a master; torch compares with masters alone.

        Raises:
            ValueError: a parameter has a master already.
        """
        known = set(map(id, self.working))
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in known:
                raise ArgumentError(
                    f"parameter {index} of shape {tuple(parameter.shape)} is in another group already, by its master: "
                    "leave it out of this one."
                )

    def collect(self) -> None:
        """Give the gradients of the 16-bit parameters to their masters: both then share one float32 tensor.

        The next backward pass adds to it in float32. If the model dropped a gradient, so does its master.
        """
        self.follow()
        for index, (working, master) in enumerate(zip(self.working, self.masters, strict=True)):
            grad, shared = working.grad, self._shared[index]
            if grad is None:
                if master.grad is shared:
                    master.grad = None
            elif (wide := settled(grad.float(), working)) is not master.grad:
                if master.grad is not None and master.grad is not shared:  # somebody set it on the master
                    wide = wide + master.grad
                if working.grad_dtype is not None:
                    working.grad = None  # its dtype cannot change while there is a gradient
                    working.grad_dtype = None
                working.grad = master.grad = self._shared[index] = wide

    def follow(self) -> None:
        """Follow outside changes to the parameters: freezing, a loaded checkpoint, swapped-in averages.

        An element of a master is kept if it still rounds to the parameter's element.
        """
        for index, (working, master) in enumerate(zip(self.working, self.masters, strict=True)):
            if master.requires_grad != working.requires_grad:
                master.requires_grad_(working.requires_grad)
            mark = self._marks[index]
            if mark is None or not mark.fits(working):
                with torch.no_grad():
                    low, wide = local(working), local(master)
                    wide.copy_(torch.where(low == wide.to(low.dtype), wide, low.float()))
                self._marks[index] = TensorMark(working)

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call ``step``, which steps ``optimizer``, while its groups hold the masters' values."""
        with writing_copies(optimizer, self) as self._written:
            return step()

    def writable(self, masters: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the 16-bit parameters that nobody has written since they agreed with their masters."""
        rows = zip(self.working, self.masters, self._marks, strict=True)
        return {id(m): w for w, m, mark in rows if id(m) in masters and mark is not None and mark.fits(w)}

    def note_written(self, copies: Container[int]) -> None:
        """Note that the parameters of the masters with these ids agree with them."""
        for working, master, mark in zip(self.working, self.masters, self._marks, strict=True):
            if mark is not None and id(master) in copies:
                mark.version = working._version

    def call(self, optimizer: Optimizer, method: Callable[[], Any]) -> Any:
        """Call a method of ``optimizer`` that may write masters, in whichever way, and let their parameters follow."""
        try:
            return self.step(optimizer, method)
        finally:
            pairs = zip(self.working, self.masters, strict=True)
            if not all(torch.equal(local(m.detach()).to(w.dtype), local(w.detach())) for w, m in pairs):
                self.publish()

    def publish(self) -> None:
        """Copy the trained masters to their 16-bit parameters, rounding to nearest, but for those that a step wrote."""
        written, self._written = self._written, set()
        pairs = enumerate(zip(self.working, self.masters, strict=True))
        moved = [i for i, (w, m) in pairs if (w.requires_grad or m.grad is not None) and id(m) not in written]
        if moved:
            with torch.no_grad():
                working, masters = ([local(kept[i]) for i in moved] for kept in (self.working, self.masters))
                _KERNELS._foreach_copy_(working, masters)
            self.note_written({id(self.masters[i]) for i in moved})

    def zero_grad(self) -> None:
        """Drop the gradients of masters and 16-bit parameters."""
        for tensor in (*self.working, *self.masters):
            tensor.grad = None
        self._shared = [None] * len(self)

    def state(self) -> list[torch.Tensor]:
        """Return the masters' values, in the order of the groups."""
        self.follow()
        return [m.detach() for m in self.masters]

    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Refuse values that ``load`` cannot take.

        Raises:
            LossScaleError: the values differ from these masters in number or shape.
        """
        if [value.shape for value in values] != [master.shape for master in self.masters]:
            raise LossScaleError(
                f"the state holds {len(values)} masters of 16-bit parameters, this optimizer has {len(self.masters)}, "
                "or they differ in shape: give the model the dtypes that it was saved with."
            )

    def load(self, values: Sequence[torch.Tensor] | None) -> None:
        """Load the masters' values, one for each, and copy them rounded to the 16-bit parameters; None: copy these to
        the masters.
        """
        with torch.no_grad():
            for index, (master, working) in enumerate(zip(self.masters, self.working, strict=True)):
                if values is not None:
                    master.copy_(values[index])
                    working.copy_(master)
                else:
                    master.copy_(working)
                self._marks[index] = TensorMark(working)


# Detect that a tensor has been written to.


class TensorMark:
    """The memory of a tensor and its version counter, at one moment.

    Writes through ``tensor.data`` (``p.data.copy_(other)``) change no counter and are not detected.
    """

    __slots__ = ("pointer", "storage", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        local_tensor: Any = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        self.version, self.pointer = tensor._version, local_tensor.data_ptr()
        self.storage = StorageWeakRef(local_tensor.untyped_storage())

    def fits(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has neither been written to nor been given other memory (``p.data = other``) since."""
        local_tensor: Any = getattr(tensor, "_local_tensor", tensor)
        if self.version != tensor._version or self.pointer != local_tensor.data_ptr():
            return False
        return not self.storage.expired()  # an expired storage's address may have been reused


_KERNELS: Any = torch  # its stubs leave the foreach kernels out
