"""A ``torch.amp.GradScaler`` for trainers that take one, with a floor, a ceiling and a count of skipped steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autocastfx.dtypes import widened
from autocastfx.errors import ArgumentError, LossScaleError, UnsupportedError, listed
from autocastfx.training import gradients
from autocastfx.training.gradients import SHARDED, agree
from autocastfx.training.loss_scale import DynamicLossScale, ScaleNumbers
from autocastfx.training.optimizer import LossScalingOptimizer, ScaledChange, exhausted
from autocastfx.training.wrapping_optimizer import needs_closure


class GradScaler(torch.amp.GradScaler):
    """Use it where a ``torch.amp.GradScaler`` is used, in a trainer or in a loop of your own; it is one.

    What differs:

    - an overflow at the smallest scale is an error that names the parameters; torch's scale falls to 0 in silence;
    - the scale stays below a ceiling;
    - a 16-bit loss is widened before it is scaled, so that the product does not overflow;
    - ``step`` without a scaled loss since the last update is an error, and ``step`` takes a closure;
    - ``skipped_steps`` counts, ``step_was_skipped`` tells of the last step, ``culprits`` names parameters;
    - processes that hold parts of the same parameters skip the same steps.

    Attributes:
        is_host_asked: True: the host asks at each step, and calls a fused optimizer's ``step`` only if it is made, for
            trainers that tell a skipped step by that. False: a fused optimizer decides on the device.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        """Make a scaler; arguments and defaults are torch's, but for the last two.

        Args:
            device: the kind of device of the losses.
            init_scale: the scale of the first step.
            growth_factor: the factor by which it grows.
            backoff_factor: the factor by which it backs off at an overflow.
            growth_interval: steps without overflow after which it grows.
            enabled: False: do nothing, as torch's.
            min_scale: the floor. An overflow there is an error.
            max_scale: the ceiling.

        Raises:
            ValueError: a number is out of its range.
        """
        self._rule = DynamicLossScale(
            *(init_scale, growth_factor, backoff_factor, growth_interval), min=min_scale, max=max_scale
        )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._left = self._rule.overflows_to_floor(init_scale)  # from the last known scale, less the steps since
        self.is_scaled = False  # since the last update
        self.is_host_asked = False
        self._found: torch.Tensor | None = None  # by the last step
        self._skips: torch.Tensor | int = 0
        self._changes: WeakKeyDictionary[Optimizer, ScaledChange] = WeakKeyDictionary()

    def scale(self, outputs: Any) -> Any:
        """Multiply ``outputs``, a tensor or a tree of tensors, by the scale, after widening 16-bit ones to float32.

        Raises:
            ValueError: there is no tensor.
        """
        if not self._enabled:
            return outputs
        self.is_scaled = True
        if isinstance(outputs, Iterator):
            outputs = list(outputs)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(outputs)):
            raise ArgumentError(f"scale takes a tensor or a tree of tensors, not a {type(outputs).__name__}")
        return pytree.tree_map_only(torch.Tensor, lambda one: super(GradScaler, self).scale(widened(one)), outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale in place, before they are clipped, for example.

        Raises:
            LossScaleError: no loss was scaled since the last update, or a gradient is float16.
            RuntimeError: the gradients are unscaled already.
            UnsupportedError: the optimizer scales its loss by itself.
        """
        if self._enabled:
            self._check(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless ``unscale_`` was called, check them, and step or skip.

        Args:
            optimizer: its ``step`` runs if all gradients are finite.
            args: arguments of the optimizer's ``step``. A closure runs once, before the gradients are unscaled; it
                scales its loss and returns it.
            kwargs: keyword arguments of the optimizer's ``step``.

        Returns:
            The closure's result; without one, the result of the optimizer's ``step``.

        Raises:
            LossScaleError: no loss was scaled since the last update; there are no gradients, or float16 ones; or they
                overflowed at the smallest scale.
            RuntimeError: the optimizer has stepped since the last update.
            UnsupportedError: the optimizer needs a closure, or scales its loss by itself.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        by_name = kwargs.pop("closure", None)
        closure, args = (args[0], args[1:]) if args else (by_name, ())
        loss = None
        if needs_closure(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} calls its closure several times in a step, and a GradScaler cannot undo "
                f"one that overflows: wrap it as LossScalingOptimizer({type(optimizer).__name__}(...))."
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        divides = getattr(optimizer, "_step_supports_amp_scaling", False) and not self.is_host_asked
        if state["stage"] is OptState.READY and not divides:
            super().unscale_(optimizer)
        if not divides and not state["found_inf_per_device"]:
            raise _without_gradients()
        if self.is_host_asked and state["stage"] is OptState.UNSCALED:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            state["stage"] = OptState.STEPPED
        else:
            result = super().step(optimizer, *args, **kwargs)
        self._note(optimizer, state["found_inf_per_device"])
        return result if closure is None else loss

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Grow, back off or count, after all optimizers have stepped; or set the scale.

        Raises:
            AssertionError: no optimizer has stepped.
        """
        super().update(new_scale)
        if not self._enabled:
            return
        self.is_scaled = False
        if new_scale is not None:
            self._left = 0
        elif self._scale is not None:
            self._scale.clamp_(self._rule.min, self._rule.max)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped, in the run that a loaded state comes from too. Waits for the device."""
        return int(self._skips)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped: hold back the schedulers. Waits for the device."""
        return self._found is not None and bool(self._found > 0)

    def culprits(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Return the names of the parameters whose present gradients are not all finite. Waits for the device.

        A parameter has a name if the optimizer was given ``model.named_parameters()``, else its place and shape.
        """
        return gradients.culprits(optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with ``skipped_steps``. Save it after ``update``."""
        state = super().state_dict()
        return state and {**state, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of a GradScaler, this one or torch's, or of a ``LossScaler``, which has no factors.

        Raises:
            LossScaleError: it is neither, or its scale is not between floor and ceiling; nothing is loaded.
            RuntimeError: it is that of a scaler that is not enabled.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(dict(state_dict))
            return
        numbers = self._rule.admit(ScaleNumbers.of(state_dict, spare=1))
        own = {name: getattr(self, f"_{name}") for name in ("growth_factor", "backoff_factor", "growth_interval")}
        super().load_state_dict({**own, **state_dict, "scale": numbers.scale, "_growth_tracker": numbers.good_steps})
        self._skips, self._left = int(state_dict.get("skipped_steps", 0)), 0
        self._found, self.is_scaled = None, False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_skips": self.skipped_steps, "_found": None, "_changes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_changes": WeakKeyDictionary()})

    def _check(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LossScalingOptimizer):
            raise UnsupportedError(
                "a LossScalingOptimizer scales its loss by itself: call its own backward(loss) and step() without a "
                "GradScaler, or give the GradScaler the optimizer that it wraps."
            )
        if self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY:
            return
        if not self.is_scaled:
            raise LossScaleError(
                "no loss was scaled since the last update(), so the gradients would be divided by a scale that they do "
                "not have: call scaler.scale(loss).backward() before the step."
            )
        if optimizer in self._changes:
            self._changes[optimizer].warn("call scaler.unscale_(optimizer) before you clip")
        else:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._changes[optimizer] = ScaledChange(parameters)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Torch's own hook: for ``unscale_``, and with a factor of 1 for optimizers that divide by themselves."""
        groups = optimizer.param_groups
        with torch.no_grad():
            grads = gradients.present(groups)
            if any(grad.dtype is torch.float16 for grad in grads):
                raise _in_float16(groups)
            if not grads:
                found_inf.fill_(-1)  # less than what other processes find
            gradients.unscale_(grads, inv_scale, found_inf)
            agree(found_inf, SHARDED, groups)
            if not grads and found_inf.item() < 0:
                return {}
        return {found_inf.device: found_inf}

    def _note(self, optimizer: Optimizer, found_inf_per_device: Mapping[torch.device, torch.Tensor]) -> None:
        """Count a step; the host asks whether it was skipped only where the scale may be at its floor."""
        if not found_inf_per_device:
            raise _without_gradients()
        (found_inf,) = found_inf_per_device.values()
        self._found = found_inf.clone()  # the update adds up in place
        self._skips = self._skips + self._found.to(torch.int32)
        self._left -= 1
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn of a skipped first step
        if self._left <= 0:
            scale = self.get_scale()
            self._left = self._rule.overflows_to_floor(scale)
            if self._left <= 0 and bool(found_inf.item()):
                raise exhausted(optimizer.param_groups, scale)


def _without_gradients() -> LossScaleError:
    return LossScaleError(
        "the optimizer has no gradients: call scaler.scale(loss).backward() before the step, with a loss that depends "
        "on its parameters, or leave the step out."
    )


def _in_float16(groups: Any) -> LossScaleError:
    names = [
        name
        for name, parameter in gradients.parameter_names(groups)
        if parameter.grad is not None and parameter.grad.dtype is torch.float16
    ]
    return LossScaleError(
        f"the gradients of {listed(names, 3)} are float16, because the weights are: unscaled they round to "
        "0, and so do small updates. Keep the weights float32 (convert casts them where they are used), or wrap the "
        "optimizer with LossScalingOptimizer, which keeps float32 masters."
    )
