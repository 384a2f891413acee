"""An optimizer that scales the loss, skips steps that overflowed, and keeps float32 masters of 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from autocastfx.errors import LossScaleError, UnsupportedError
from autocastfx.training import gradients
from autocastfx.training.agreement import SHARDED, Agreeing, checked
from autocastfx.training.fused_step import FusedStep
from autocastfx.training.loss_scale import DynamicLossScale, LossScale
from autocastfx.training.loss_scaler import LossScaler
from autocastfx.training.masters import Masters
from autocastfx.training.scaled_change import ScaledChange
from autocastfx.training.snapshot import Snapshot
from autocastfx.training.step_result import GradientsOf, StepResult, exhausted, overflowed
from autocastfx.training.unscaled import Unscaled, unscale_
from autocastfx.training.wrapping_optimizer import WrappingOptimizer, needs_closure, steps_to_make_state, steps_twice

__all__ = ["LossScalingOptimizer"]

Losses = TypeVar("Losses")
_OWN = ("loss_scale", "masters")  # keys that a bare optimizer's state dict does not have


class LossScalingOptimizer(WrappingOptimizer):
    """Wraps any ``torch.optim`` optimizer for training in float16.

    ::

        optimizer = LossScalingOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
        optimizer.backward(loss)  # or optimizer.scale_loss(loss).backward()
        optimizer.step()

    ``step`` divides the gradients by the scale, in float32. If one is not finite it skips the step: no bit of a weight
    or of the optimizer state changes, and the scale backs off. A fused optimizer decides this on the device and the
    host reads nothing, except in the first step, which creates the optimizer state; with other optimizers the host
    reads one number per step.

    16-bit parameters get float32 masters: ``param_groups`` holds the masters, and each step copies them back, rounded.
    After ``unscale_``, ``accumulate`` or ``step`` a parameter and its master share one float32 gradient.

    Hooks for state dicts belong to the wrapped optimizer; step hooks run around each call of this one's ``step``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scale: LossScale | LossScaler | None = None,
        *,
        process_group: Agreeing = SHARDED,
    ) -> None:
        """Wrap ``optimizer``.

        Args:
            optimizer: the wrapper shares its ``param_groups`` and ``state``.
            loss_scale: a rule (None: ``DynamicLossScale()``), or the ``loss_scaler`` of another wrapper, to share its
                scale; then call ``loss_scaler.update()`` after the steps of all.
            process_group: processes that skip a step if one of them overflows. ``"sharded"``: those that hold other
                parts of these parameters, as under FSDP and tensor parallelism; under DDP gradients, and so overflows,
                are the same in all. ``"world"``: all processes, which then must step alike. None: this one alone.

        Raises:
            UnsupportedError: the optimizer is wrapped already, or has complex parameters.
            TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
            ValueError: ``process_group`` is another word.
        """
        if isinstance(optimizer, LossScalingOptimizer):
            raise UnsupportedError(
                "the optimizer scales its loss already: wrap the one that it wraps, or use it as it is."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LossScalingOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            gradients.refuse_complex(group)
        super().__init__(optimizer)
        is_live = isinstance(loss_scale, LossScaler)
        self.loss_scaler = loss_scale if is_live else LossScaler(loss_scale or DynamicLossScale())
        self.process_group = checked(process_group)
        self.masters = Masters(optimizer)
        self._set_up()

    def _set_up(self) -> None:
        self.loss_scaler.rounds.join(self)
        self.change = ScaledChange(self.model_parameters())
        self._searches = needs_closure(self.optimizer)
        self._fused = FusedStep()
        self._unscaled: Unscaled | None = None  # None while the gradients are scaled
        self._epoch = 0  # counts events after which the gradients are not those of the last step
        self._last: StepResult | tuple[Unscaled, int] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer.

        Raises:
            UnsupportedError: a parameter is complex.
            ValueError: a parameter is in another group already.
        """
        self.optimizer.add_param_group(param_group)
        added = self.optimizer.param_groups[-1]
        try:
            gradients.refuse_complex(added)
            self.masters.refuse_known(added)
        except (UnsupportedError, ValueError):
            self.optimizer.param_groups.pop()
            raise
        self.masters.adopt(added, self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those of masters and of 16-bit parameters."""
        self._forget()
        self.optimizer.zero_grad(set_to_none)
        self.masters.zero_grad()

    def model_parameters(self) -> list[torch.Tensor]:
        """Return the model's parameters: those of ``param_groups``, with 16-bit ones in place of their masters."""
        masters = set(map(id, self.masters.masters))
        own = [p for group in self.param_groups for p in group["params"] if id(p) not in masters]
        return [*self.masters.working, *own]

    # ---- scaling ----------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Losses) -> Losses:
        """Multiply ``loss``, a tensor or a tree of tensors, by the scale, after widening 16-bit losses to float32.

        With a shared scale, the loss is for this optimizer alone; use ``loss_scaler.scale(loss)`` for all.

        Raises:
            LossScaleError: the present gradients are unscaled already, so that scaled ones cannot be added.
        """
        if self._unscaled is not None:
            raise LossScaleError(
                "the gradients are unscaled already, and those of a further loss would be added scaled: call step() "
                "first, or zero_grad()."
            )
        self._epoch += 1
        return self.loss_scaler.scale(loss, self)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Call ``scale_loss(loss).backward(**options)``."""
        self.scale_loss(loss).backward(**options)

    def accumulate(self) -> None:
        """Add up the gradients of 16-bit parameters in float32. Call it after the backward of each micro-batch.

        Sums of many 16-bit gradients lose small ones. After this call the gradients of 16-bit parameters are float32
        tensors, shared with the masters, and further backward passes add to them in float32.
        """
        self.masters.collect()

    def unscale_(self) -> None:
        """Divide the gradients by the scale in place, to inspect or change them before ``step``.

        A second call before the step does nothing. Gradients of 16-bit parameters become float32, shared with the
        masters.

        Raises:
            LossScaleError: no loss was scaled since the last step or ``zero_grad``; or, with a shared scale, this
                optimizer has stepped since the scale's last update, or added up gradients across it.
        """
        if self.masters.masters:
            self.masters.collect()
        if self._unscaled is not None:
            return
        with torch.no_grad():
            self._unscaled = unscale_(self, self.optimizer.param_groups, self.loss_scaler, self.process_group)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale the gradients and clip their total norm, as ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, float32, no dimensions; ``last_step.grad_norm`` will be this one.
        """
        self.unscale_()
        with torch.no_grad():
            norm = gradients.clip_norm_(self.param_groups, max_norm, norm_type)
        cast("Unscaled", self._unscaled).norm = norm
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Unscale the gradients and clip each element to [-clip_value, clip_value]."""
        self.unscale_()
        with torch.no_grad():
            gradients.clip_value_(self.param_groups, clip_value)

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale the gradients, check them, and step or skip.

        Args:
            closure: computes gradients with ``backward`` or ``scale_loss`` and returns the unscaled loss. An optimizer
                that needs a closure (LBFGS) may call it several times; if one call overflows or raises, the whole
                step is undone.

        Returns:
            The closure's result; without a closure, the result of the wrapped optimizer's step.

        Raises:
            LossScaleError: no loss was scaled; or gradients are not finite at the smallest scale.
        """
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return self._hooked(self._step, closure)
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None and self._searches:
            return self._search(closure)
        if closure is None and not self.optimizer.state and self._makes_state():
            return self.optimizer.step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.unscale_()
        result = self._step_or_skip(cast("Unscaled", self._unscaled).found_inf)
        return loss if closure is not None else result

    def _makes_state(self) -> bool:
        has_loss = self._unscaled is not None or self.loss_scaler.rounds.is_scaled(self)
        return self.loss_scaler.rule.is_checked and not has_loss and steps_to_make_state(self.optimizer)

    def _step_or_skip(self, found_inf: torch.Tensor) -> Any:
        result, skipped = None, None
        if not self.loss_scaler.rule.is_checked:
            result, skipped = self.optimizer.step(), False
        elif self._fused.decides(self.optimizer):
            result = self._fused.step(self.optimizer, found_inf)
        else:
            skipped = overflowed(found_inf)
            if not skipped:
                result = self.optimizer.step()
                self._fused.note(self.optimizer)
        self._finish(skipped)
        return result

    def _search(self, closure: Callable[[], Any]) -> Any:
        seen: list[Any] = [None]
        if steps_twice(self.optimizer):  # with the gradients that there are
            self.unscale_()
            if cast("Unscaled", self._unscaled).found_inf.item():
                self._finish(True)
                return None

        def evaluate() -> Any:
            self._unscaled = None
            self.masters.publish()
            with torch.enable_grad():
                seen[0] = closure()
            self.unscale_()
            if cast("Unscaled", self._unscaled).found_inf.item():
                raise _Overflow
            return seen[0]

        try:
            with Snapshot(self.optimizer, self.masters):
                result, skipped = cast("Any", self.optimizer).step(evaluate), False
        except _Overflow:
            result, skipped = seen[0], True
        self._finish(skipped)
        return result

    def _finish(self, skipped: bool | None) -> None:
        if skipped:
            inner: Any = self.optimizer
            inner._opt_called = True  # or its schedulers would warn that it never stepped
        elif self.masters.masters:
            self.masters.publish()
        self._epoch += 1
        unscaled, self._unscaled = cast("Unscaled", self._unscaled), None
        self._last = unscaled, self._epoch
        if self.loss_scaler.rule.is_checked:
            found_inf = None if unscaled.is_empty else unscaled.found_inf
            if self.loss_scaler.stepped(self, found_inf, skipped):
                raise exhausted(self.param_groups, self.loss_scaler.value)

    @property
    def last_step(self) -> StepResult:
        """The result of the last step. Reading a value of it waits for the device.

        Raises:
            LossScaleError: there was no step yet.
        """
        if self._last is None:
            raise LossScaleError("there was no step yet: call step() first.")
        if isinstance(self._last, tuple):  # made on demand, because most callers never read it
            unscaled, epoch = self._last
            still = GradientsOf(self.param_groups, lambda: self._epoch == epoch)
            self._last = StepResult(unscaled, still)
        return self._last

    def step_scheduler(self, scheduler: Any, *args: Any) -> None:
        """Call ``scheduler.step(*args)`` unless the last step was skipped."""
        if not self.last_step.skipped:
            scheduler.step(*args)

    def _forget(self) -> None:
        self._unscaled = None
        self._epoch += 1
        self.loss_scaler.rounds.drop(self)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, with ``loss_scale`` (numbers) and any ``masters`` (tensors)."""
        found = dict(self.optimizer.state_dict())
        found["loss_scale"] = self.loss_scaler.state_dict()
        if len(self.masters):
            found["masters"] = self.masters.state()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, of a bare optimizer, or of a ``torch.amp.GradScaler``.

        A bare optimizer's leaves the scale as it is and sets the masters to the present weights. A GradScaler's sets
        only the scale and its counter.

        Raises:
            LossScaleError: the masters do not fit these parameters, or a run with this rule cannot have this loss
                scale; nothing is loaded.
            ValueError: the groups do not fit this optimizer (raised by torch).
        """
        if "param_groups" not in state_dict and "loss_scale" not in state_dict:
            self.loss_scaler.load_state_dict(state_dict)
            return
        masters = state_dict.get("masters")
        if masters is not None:
            self.masters.check(masters)
        if "loss_scale" in state_dict:
            self.loss_scaler.admit(state_dict["loss_scale"])  # refuses before anything is loaded
        self.optimizer.load_state_dict({key: held for key, held in state_dict.items() if key not in _OWN})
        if "loss_scale" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scale"])
        self.masters.load(masters)
        self._fused.note_loaded(self.optimizer)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("optimizer", "loss_scaler", "process_group", "masters")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._wrap()
        self._set_up()

    def __repr__(self) -> str:
        return f"LossScalingOptimizer({self.loss_scaler.rule!r}, {self.optimizer!r})"


class _Overflow(Exception):
    """A closure's gradients are not finite."""
