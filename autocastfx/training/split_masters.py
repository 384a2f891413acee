"""Float32 masters in four bytes: a bfloat16 weight, and the 16 bits that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autocastfx.dtypes import dtype_name
from autocastfx.errors import ArgumentError, LossScaleError, UnsupportedError
from autocastfx.training.gradients import local
from autocastfx.training.masters import Masters, TensorMark
from autocastfx.training.wrapping_optimizer import needs_closure, steps_by_itself


class SplitMasters(Masters):
    """Masters of bfloat16 parameters that exist in float32 only while they are updated.

    An optimizer of ``torch.optim`` that updates each parameter by itself does so for some at a time; any other one sees
    all masters at once, for nobody knows what it computes of all of them. In between, the elements of ``param_groups``
    are NaN. A write into a parameter keeps the rests, so that its master rounds to what was written.
    """

    most = 1 << 22  # numbers that are float32 at one time; a larger parameter is alone

    def __init__(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            _refuse(group, optimizer)
        if not any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"]):
            raise ArgumentError("masters='split' is for bfloat16 parameters, and the optimizer has none: leave it out")
        self.rests: list[torch.Tensor] = []
        self._hidden: dict[int, TensorMark] = {}  # of the masters that are NaN
        super().__init__(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rests": self.rests}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hidden = {}
        for index in range(len(self)):  # a copy of a master has memory for its NaN
            self._hide(index)

    def refuse_known(self, group: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Refuse a new group also for what cannot be split.

        Raises:
            UnsupportedError: a parameter is float16, or the optimizer steps by a closure.
            ValueError: a parameter has a master already.
        """
        _refuse(group, optimizer)
        super().refuse_known(group, optimizer)

    def _add(self, parameter: torch.Tensor) -> torch.Tensor:
        master = super()._add(parameter)
        self.rests.append(torch.zeros_like(local(parameter).detach(), dtype=torch.int16))
        self._hide(len(self) - 1)
        return master

    def follow(self) -> None:
        """Follow the freezing of parameters. Rests stay, whatever is written into parameters."""
        for working, master in zip(self.working, self.masters, strict=True):
            master.requires_grad_(working.requires_grad)

    def publish(self) -> None:
        """Do nothing: weights are written when their masters are split."""

    def state(self) -> list[torch.Tensor]:
        """Return the masters' values, in the order of the groups."""
        values = list[torch.Tensor]()
        for index, master in enumerate(self.masters):
            is_hidden = index in self._hidden  # not in a hook of the step that updates it
            if is_hidden:
                self._show(index)
            values.append(master.detach().clone())
            if is_hidden:
                self._hide(index)
        return values

    def load(self, values: Sequence[torch.Tensor] | None) -> None:
        """Load the masters' values, one for each, and round them to the parameters; None: the parameters are the
        masters.
        """
        for index, master in enumerate(self.masters):
            if values is None:
                self.rests[index].zero_()
                continue
            self._show(index)
            try:
                with torch.no_grad():
                    master.copy_(values[index])
            finally:
                self._split(index)

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call ``step`` for all parameters of ``optimizer``, or for some at a time.

        Raises:
            LossScaleError: a parameter has another dtype by now, or a master was written; nothing is changed.
        """
        for index in range(len(self)):
            self._check(index)
        groups, parameters = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
        parts = list(self._parts(parameters)) if steps_by_itself(optimizer, _OF_EACH) else [range(len(self))]
        if len(parts) < 2:
            return self._step_of(parts[0] if parts else (), step)
        try:
            for part in parts:
                chosen = {id(self.masters[index]) for index in part}
                if part is parts[0]:
                    chosen |= {id(p) for own in parameters for p in own} - set(map(id, self.masters))
                for group, own in zip(groups, parameters, strict=True):
                    group["params"] = [p for p in own if id(p) in chosen]
                optimizer.param_groups[:] = [group for group in groups if group["params"]]
                self._step_of(part, step)
        finally:
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own
            optimizer.param_groups[:] = groups
        return None

    def _step_of(self, part: Sequence[int], step: Callable[[], Any]) -> Any:
        for index in part:
            self._show(index)
        try:
            return step()
        finally:
            for index in part:
                self._split(index)

    def _parts(self, parameters: Sequence[Sequence[torch.Tensor]]) -> Iterator[Sequence[int]]:
        """Yield the numbers of masters to update together: those with gradients, each once."""
        masters = {id(master): index for index, master in enumerate(self.masters)}
        part, count = list[int](), 0
        for parameter in dict.fromkeys(p for own in parameters for p in own):
            index = masters.get(id(parameter))
            if index is None or parameter.grad is None:
                continue
            if part and count + self.rests[index].numel() > self.most:
                yield part
                part, count = [], 0
            part.append(index)
            count += self.rests[index].numel()
        if part:
            yield part

    def _check(self, index: int) -> None:
        working, master = self.working[index], self.masters[index]
        if working.dtype != torch.bfloat16 or working.shape != master.shape:
            raise LossScaleError(
                f"a parameter that was bfloat16 of shape {tuple(master.shape)} is {dtype_name(working.dtype)} of shape "
                f"{tuple(working.shape)} now, for which masters='split' has no rest: make the model what it will be "
                "before the optimizer."
            )
        if index in self._hidden and not self._hidden[index].fits(master):
            raise LossScaleError(
                f"the master of a parameter of shape {tuple(master.shape)} was written between steps, where "
                "masters='split' keeps none: write into the model's parameter, or leave masters out."
            )

    def _show(self, index: int) -> None:
        self._check(index)
        self._hidden.pop(index, None)
        with torch.no_grad():
            _put(self.masters[index], join(local(self.working[index]).detach(), self.rests[index]))

    def _split(self, index: int) -> None:
        with torch.no_grad():
            split(local(self.masters[index]).detach(), local(self.working[index]), self.rests[index])
        self._hide(index)

    def _hide(self, index: int) -> None:
        """Let a master be NaN, in the memory of one number."""
        master = self.masters[index]
        values = local(master)
        _put(master, values.new_full((), torch.nan).expand(values.shape))
        self._hidden[index] = TensorMark(master)


# Split a float32 number, and join it again. The weight is rounded to nearest, halves away from zero: then what is left,
# the lower 16 bits read as a whole number with its sign, says which number it was. Halves rounded to even, as
# ``to(bfloat16)`` does, would take one bit more: an even weight stands for the halves on both of its sides.


_HALF, _INFINITY = 1 << 15, 0x7F80


def split(master: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> None:
    """Write a float32 tensor as a bfloat16 weight and an int16 rest of its shape, in place. ``master`` is used up."""
    are_nan = master.isnan()  # some would overflow to -0.0
    bits = master.view(torch.int32)
    rest.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(_HALF).bitwise_right_shift_(16))
    weight.masked_fill_(are_nan, torch.nan)


def _drop_impossible(weight: torch.Tensor, rest: torch.Tensor) -> None:
    magnitude = weight.view(torch.int16) & 0x7FFF
    rest.masked_fill_(((magnitude == 0) & (rest < 0)) | ((magnitude == _INFINITY) & (rest > 0)), 0)


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the float32 tensor that was split; a NaN may have become another.

    If ``weight`` was written since, the result rounds to what was written: ``rest`` is kept, but for those that 0 and
    infinities cannot have, which become 0, in place.
    """
    _drop_impossible(weight, rest)
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(rest).view(torch.float32)


# Those that compute nothing of all parameters, and keep nothing for them.
_OF_EACH = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
)


def _refuse(group: Mapping[str, Any], optimizer: Optimizer) -> None:
    other = next((p for p in group["params"] if p.dtype == torch.float16), None)
    if other is not None:
        raise UnsupportedError(
            f"masters='split' is for bfloat16 parameters, and one of shape {tuple(other.shape)} is float16: leave "
            "masters out, for masters in float32."
        )
    if needs_closure(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} moves all parameters together, by a closure, and masters='split' updates some "
            "at a time: leave masters out, for masters in float32."
        )


def _put(master: torch.Tensor, values: torch.Tensor) -> None:
    if hasattr(master, "_local_tensor"):  # a DTensor
        sharded: Any = master
        sharded._local_tensor = values
    else:
        master.data = values
