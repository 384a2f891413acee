"""Three rules for the loss scale, the factor of a loss before its backward pass: none, static and dynamic.

float16 rounds magnitudes of 2**-25 and below to zero, and many gradients are as small. Scaling the loss scales all
gradients; the optimizer divides by the scale in float32 (Micikevicius et al., "Mixed Precision Training", ICLR 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autocastfx.errors import ArgumentError, LossScaleError


class LossScale:
    """A rule for the scale; by this one no step changes it.

    Attributes:
        is_checked: True if a step whose gradients are not all finite is skipped.
    """

    is_checked = True

    @property
    def initial(self) -> float:
        """The scale of the first step."""
        raise NotImplementedError

    @property
    def spare(self) -> int:
        """The overflow at which the scale first backs off; 1: at the first."""
        return 1

    def state(self, device: torch.device) -> ScaleState:
        """Make the state before the first step."""
        return ScaleState(
            torch.full((), self.initial, dtype=torch.float32, device=device),
            torch.zeros((), dtype=torch.int32, device=device),
            torch.full((), self.spare, dtype=torch.int32, device=device),
            torch.zeros((), dtype=torch.float32, device=device),
        )

    def adjust(self, state: ScaleState, found_inf: torch.Tensor) -> None:
        """Update ``state`` after a step. ``found_inf`` (float32, no dimensions) is 1 if it was skipped, else 0.

        The host reads nothing.
        """

    def admit(self, saved: ScaleNumbers) -> ScaleNumbers:
        """Return the numbers with which a run with this rule continues from a checkpoint that holds ``saved``.

        Raises:
            LossScaleError: a run with this rule cannot have the saved scale.
        """
        if saved.scale != _float32(self.initial):
            raise LossScaleError(
                f"the state holds the loss scale {saved.scale:g}, but the scale of {self} is always {self.initial:g}: "
                f"{_OTHER_RULE}"
            )
        return ScaleNumbers(saved.scale, 0, 1)

    def overflows_to_floor(self, scale: float) -> float:
        """Return how many overflows bring ``scale`` to the floor, where one more is an error; inf without a floor."""
        return math.inf


# The changing state of a loss scale, as tensors on a device and as numbers in a checkpoint.


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass
class ScaleState:
    """The state of a loss scale: tensors without dimensions on one device, updated in place.

    Attributes:
        scale: float32; the factor of losses.
        good_steps: int32; steps without overflow since the scale last changed.
        spare: int32; overflows until the scale backs off.
        found: float32; 1 if a step overflowed since a shared scale was last updated, else 0.
    """

    scale: torch.Tensor
    good_steps: torch.Tensor
    spare: torch.Tensor
    found: torch.Tensor

    def to(self, device: torch.device) -> ScaleState:
        """Copy the state to ``device``."""
        return ScaleState(*(tensor.to(device) for tensor in (self.scale, self.good_steps, self.spare, self.found)))

    def fill(self, numbers: ScaleNumbers) -> None:
        """Set the state to ``numbers``."""
        self.scale.fill_(numbers.scale)
        self.good_steps.fill_(numbers.good_steps)
        self.spare.fill_(numbers.spare)
        self.found.zero_()


@dataclass(frozen=True)
class ScaleNumbers:
    """The numbers of a ``ScaleState``, as a checkpoint holds them."""

    scale: float
    good_steps: int
    spare: int

    @staticmethod
    def of(saved: Mapping[str, Any], *, spare: int) -> ScaleNumbers:
        """Read the state dict of a loss scale, or of a ``torch.amp.GradScaler``, which has no ``spare``.

        Raises:
            LossScaleError: ``saved`` is neither, or a number is out of range.
        """
        scale, good_steps = saved.get("scale"), saved.get("good_steps", saved.get("_growth_tracker"))
        if scale is None or good_steps is None:
            raise LossScaleError(
                "a loss scale's state has 'scale' and 'good_steps' (a GradScaler's '_growth_tracker'), this one has "
                f"{sorted(saved)}: give it what LossScalingOptimizer.state_dict() or GradScaler.state_dict() gave."
            )
        if not (isinstance(scale, (int, float)) and _SMALLEST <= scale <= _LARGEST):
            raise LossScaleError(
                f"a loss scale is a positive finite number, in float32 too, and the state holds {scale!r}: load the "
                "state without it."
            )
        counts = {"good_steps": good_steps, "spare": saved.get("spare", spare)}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 0:
                raise LossScaleError(
                    f"{name!r} of a loss scale's state is a whole number of at least 0, not {count!r}: load the state "
                    "without it."
                )
        return ScaleNumbers(float(scale), **counts)


_KERNELS: Any = torch  # its stubs leave the fused kernels out
_LARGEST_FLOAT16 = 65504.0
_OTHER_RULE = "give the rule of the run that was saved, or load the state without its 'loss_scale'."


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """Does not scale losses or check gradients: for bfloat16 and float32."""

    is_checked = False

    @property
    def initial(self) -> float:
        """The scale: 1."""
        return 1.0


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """Always uses the same scale; a step with non-finite gradients is skipped.

    Raises:
        ValueError: the scale is not a positive finite number.
    """

    scale: float = 2.0**16

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)

    @property
    def initial(self) -> float:
        """The scale."""
        return self.scale


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Keeps the scale as large as the gradients allow: it grows after steps without overflow, and backs off at one.

    Follows ``torch.amp.GradScaler``, with a floor, a ceiling and the hysteresis of Megatron-LM's
    ``DynamicGradScaler``: growing restores the tolerated number of overflows, backing off does not.

    Attributes:
        init: the scale of the first step.
        growth: the factor by which it grows.
        backoff: the factor by which it backs off.
        interval: steps without overflow after which it grows.
        hysteresis: the overflow since the last growth at which it backs off; 1: at the first.
        min: the floor. An overflow there is an error that names the parameters.
        max: the ceiling.

    Raises:
        ValueError: a number is out of its range.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    min: float = 1.0
    max: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("init", "min", "max"):
            _check_positive(name, getattr(self, name))
        for name in ("interval", "hysteresis"):
            given: Any = getattr(self, name)
            if not isinstance(given, int) or given < 1:
                raise ArgumentError(f"{name} is a whole number of at least 1, not {given!r}")
        if not (self.growth >= 1 and math.isfinite(self.growth)):
            raise ArgumentError(f"growth is a finite factor of at least 1, not {self.growth!r}")
        if not 0 < self.backoff < 1:
            raise ArgumentError(f"backoff is a factor between 0 and 1, not {self.backoff!r}")
        if not self.min <= self.init <= self.max:
            raise ArgumentError(
                f"init is between min and max: {self.min!r} <= {self.init!r} <= {self.max!r} does not hold"
            )

    @property
    def initial(self) -> float:
        """The scale of the first step."""
        return self.init

    @property
    def spare(self) -> int:
        """The overflow at which the scale first backs off: ``hysteresis``."""
        return self.hysteresis

    def adjust(self, state: ScaleState, found_inf: torch.Tensor) -> None:
        """Grow, back off or count the step."""
        backs_off = found_inf if self.hysteresis == 1 else self._tolerate(state, found_inf)
        _KERNELS._amp_update_scale_(state.scale, state.good_steps, backs_off, self.growth, self.backoff, self.interval)
        state.scale.clamp_(self.min, self.max)
        if self.hysteresis > 1:
            has_grown = (state.good_steps == 0) & (found_inf == 0)
            state.spare.masked_fill_(has_grown, self.hysteresis)

    @staticmethod
    def _tolerate(state: ScaleState, found_inf: torch.Tensor) -> torch.Tensor:
        overflow = found_inf.to(torch.int32)
        state.spare.sub_(overflow).clamp_(min=0)
        state.good_steps.mul_(1 - overflow).sub_(overflow)  # -1, so that a tolerated overflow leaves 0 steps counted
        return found_inf * (state.spare == 0)

    def admit(self, saved: ScaleNumbers) -> ScaleNumbers:
        """Return ``saved``, its counters limited to this rule's, if its scale is in [min, max]; else raise."""
        if not _float32(self.min) <= saved.scale <= _float32(self.max):
            raise LossScaleError(
                f"the state holds the loss scale {saved.scale:g}, which is not between min={self.min:g} and "
                f"max={self.max:g} of this run: {_OTHER_RULE}"
            )
        good_steps = min(saved.good_steps, self.interval - 1)
        return ScaleNumbers(saved.scale, good_steps, min(saved.spare, self.hysteresis))

    def overflows_to_floor(self, scale: float) -> float:
        """Return how many times ``scale`` can back off before it is at the floor."""
        count = 0
        while scale > self.min:
            scale, count = scale * self.backoff, count + 1
        return count


def suggest_loss_scale(largest_gradient: float, *, margin: float = 1.0) -> float:
    """Return the largest power of two that keeps the scaled gradients below float16's maximum, 65504.

    Args:
        largest_gradient: the largest magnitude of an unscaled gradient, of weights and of activations.
        margin: a further factor by which the scaled gradients stay below.

    Raises:
        ValueError: an argument is not a positive finite number.
    """
    _check_positive("largest_gradient", largest_gradient)
    _check_positive("margin", margin)
    exponent = math.floor(math.log2(_LARGEST_FLOAT16) - math.log2(largest_gradient) - math.log2(margin))
    while largest_gradient * margin * 2.0**exponent >= _LARGEST_FLOAT16:  # logarithms are rounded
        exponent -= 1
    while largest_gradient * margin * 2.0 ** (exponent + 1) < _LARGEST_FLOAT16:
        exponent += 1
    return 2.0**exponent


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))  # as a state holds it


def _check_positive(name: str, given: float) -> None:
    if not (isinstance(given, (int, float)) and math.isfinite(given) and given > 0):
        raise ArgumentError(f"{name} is a positive finite number, not {given!r}")


# Move a number between devices, and read it from one without making the host wait.


class Seen(NamedTuple):
    """A number, and its age in calls of ``arrived``."""

    number: float
    age: int


class HostCopy:
    """Copies a number from a CUDA device to the host in the background."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None
        self.event: torch.cuda.Event | None = None  # of the copy in progress
        self._age = 0

    def start(self, number: torch.Tensor) -> None:
        """Start copying ``number`` (float32, no dimensions). Does nothing off CUDA, or while a copy is in progress."""
        if not number.is_cuda or self.event is not None:
            return
        if self._pinned is None:
            self._pinned = torch.empty((), dtype=torch.float32, pin_memory=True, device="cpu")
        self._pinned.copy_(number, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(number.device))  # by default it is that of the current device
        self._age = 0

    def arrived(self) -> Seen | None:
        """Return the number if its copy is complete, else None."""
        self._age += 1
        if self.event is None or self._pinned is None or not self.event.query():
            return None
        self.event = None
        return Seen(float(self._pinned.item()), self._age)

    def read(self, number: torch.Tensor) -> Seen:
        """Return the number as it is now. Waits for the device."""
        self.event = None
        return Seen(float(number.item()), 0)


def moved(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``number`` on ``device``. The host waits for a copy to a CPU, which may be read at once."""
    return number.to(device, non_blocking=device.type != "cpu")


def is_capturing(tensors: Iterable[torch.Tensor]) -> bool:
    """True while work of this thread on the device of one of ``tensors`` is being captured into a CUDA graph."""
    return any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing()
