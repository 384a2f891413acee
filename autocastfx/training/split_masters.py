"""Float32 masters in four bytes: a bfloat16 weight, and the 16 bits that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autocastfx.errors import ArgumentError, UnsupportedError
from autocastfx.training.gradients import local
from autocastfx.training.masters import Masters
from autocastfx.training.wrapping_optimizer import needs_closure

# Split a float32 number, and join it again. The weight is rounded to nearest, halves away from zero: then what is left,
# the lower 16 bits read as a whole number with its sign, says which number it was. Halves rounded to even, as
# ``to(bfloat16)`` does, would take one bit more: an even weight stands for the halves on both of its sides.

_HALF = 1 << 15


def split(master: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> None:
    """Write a float32 tensor as a weight and a rest, in place. ``master`` is used up.

    Args:
        master: float32.
        weight: bfloat16, of the same shape.
        rest: int16, of the same shape.
    """
    are_nan = master.isnan()  # some would overflow to -0.0
    bits = master.view(torch.int32)
    rest.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(_HALF).bitwise_right_shift_(16))
    weight.masked_fill_(are_nan, torch.nan)


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the float32 tensor that was split; a NaN may have become another."""
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(rest).view(torch.float32)


class SplitMasters(Masters):
    """Masters of bfloat16 parameters that exist in float32 only while they are updated, some parameters at a time.

    In between, the elements of ``param_groups`` are NaN: whoever reads them sees it, and cannot write. A write into a
    parameter keeps the rests, so that its master still rounds to what was written.
    """

    most = 1 << 22  # numbers that are float32 at one time; a larger parameter is alone

    def __init__(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            _refuse(group, optimizer)
        if not any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"]):
            raise ArgumentError("masters='split' is for bfloat16 parameters, and the optimizer has none: leave it out")
        self.rests: list[torch.Tensor] = []
        super().__init__(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rests": self.rests}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for master in self.masters:  # a copy of a master has memory for its NaN
            _hide(master)

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
        _hide(master)
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
            self._show((index,))
            values.append(master.detach().clone())
            _hide(master)
        return values

    def load(self, values: Sequence[torch.Tensor] | None) -> None:
        """Load the masters' values, and round them to the parameters.

        Args:
            values: one for each master; None: the parameters are the masters.
        """
        for index, master in enumerate(self.masters):
            if values is None:
                self.rests[index].zero_()
                continue
            self._show((index,))
            try:
                with torch.no_grad():
                    master.copy_(values[index])
            finally:
                self._split((index,))

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call ``step`` for some parameters of ``optimizer`` at a time.

        Raises:
            UnsupportedError: the optimizer has step hooks of its own; or it keeps a number for all parameters together,
                which comes out otherwise for some of them.
        """
        groups, parameters = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
        parts = list(self._parts(parameters))
        if len(parts) > 1:
            _refuse_hooks(optimizer)
        numbers, result = _Numbers(optimizer) if len(parts) > 1 else None, None
        try:
            for part, chosen in parts:
                for group, own in zip(groups, parameters, strict=True):
                    group["params"] = [p for p in own if id(p) in chosen]
                optimizer.param_groups[:] = [group for group in groups if group["params"]]
                self._show(part)
                try:
                    result = step()
                finally:
                    self._split(part)
                if numbers is not None:
                    numbers.note()
        finally:
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own
            optimizer.param_groups[:] = groups
        if numbers is not None:
            numbers.keep()
        return result

    def _parts(self, parameters: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[list[int], set[int]]]:
        """Yield the numbers of masters to update together, and the ids of all parameters of that step."""
        masters = {id(master): index for index, master in enumerate(self.masters)}
        part, chosen, count = list[int](), set[int](), 0
        for parameter in (p for own in parameters for p in own):
            index = masters.get(id(parameter))
            if index is not None and parameter.grad is not None:
                if part and count + self.rests[index].numel() > self.most:
                    yield part, chosen
                    part, chosen, count = [], set(), 0
                part.append(index)
                count += self.rests[index].numel()
            if index is None or parameter.grad is not None:
                chosen.add(id(parameter))
        yield part, chosen

    def _show(self, part: Sequence[int]) -> None:
        with torch.no_grad():
            for index in part:
                _put(self.masters[index], join(local(self.working[index]).detach(), self.rests[index]))

    def _split(self, part: Sequence[int]) -> None:
        with torch.no_grad():
            for index in part:
                working, master = self.working[index], self.masters[index]
                split(local(master).detach(), local(working), self.rests[index])
                _hide(master)


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


def _hide(master: torch.Tensor) -> None:
    """Let ``master`` be NaN, in the memory of one number."""
    values = local(master)
    _put(master, values.new_full((), torch.nan).expand(values.shape))


def _refuse_hooks(optimizer: Any) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedError(
            f"masters='split' calls the step of {type(optimizer).__name__} for some parameters at a time, and its step "
            "hooks would run each time: register them on the LossScalingOptimizer."
        )


class _Numbers:
    """What an optimizer keeps for many parameters together: each part of a step begins with what was there before it.

    Counters then count steps. A number that is computed from parameters would differ from part to part.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._before = self._read()
        self._after: dict[Any, Any] = {}

    def _read(self) -> dict[Any, Any]:
        holders = [*self._optimizer.param_groups, vars(self._optimizer)]
        holders += [kept for key, kept in self._optimizer.state.items() if not isinstance(key, torch.Tensor)]
        found: dict[Any, Any] = {}
        for holder in (holder for holder in holders if isinstance(holder, Mapping)):
            for name, value in holder.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    found[id(holder), name] = (holder, value)
                elif isinstance(value, torch.Tensor):
                    found[id(holder), name] = (None, value._version)
        return found

    def note(self) -> None:
        """Note what a part has changed, and put back what was there.

        Raises:
            UnsupportedError: another part has changed it otherwise.
        """
        for key, (holder, value) in self._read().items():
            was = self._before.get(key, (None, None))[1]
            if value == was:
                continue
            if holder is None or self._after.get(key, (holder, value))[1] != value:
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} computes {key[1]!r} from all parameters together, and "
                    "masters='split' updates some at a time: leave masters out, for masters in float32."
                )
            self._after[key] = (holder, value)
            if was is not None:
                holder[key[1]] = was
            else:
                del holder[key[1]]

    def keep(self) -> None:
        """Put there what the parts have agreed on."""
        for (_, name), (holder, value) in self._after.items():
            holder[name] = value
