"""An optimizer that scales the loss, skips steps that overflowed, and keeps float32 masters of 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autocastfx.errors import LossScaleError, UnsupportedError
from autocastfx.training import gradients
from autocastfx.training.fused_step import FusedStep
from autocastfx.training.loss_scale import DynamicLossScale, LossScale
from autocastfx.training.loss_scaler import LossScaler
from autocastfx.training.masters import Masters
from autocastfx.training.snapshot import Snapshot
from autocastfx.training.step_result import GradientsOf, StepResult, exhausted
from autocastfx.training.unscaled import Unscaled, unscale_
from autocastfx.training.wrapping_optimizer import WrappingOptimizer, needs_closure, steps_to_make_state

__all__ = ["LossScalingOptimizer"]

Losses = TypeVar("Losses")
_OWN = ("loss_scale", "masters")  # keys of a state dict that a bare optimizer's does not have


class LossScalingOptimizer(WrappingOptimizer):
    """Any optimizer of ``torch.optim``'s protocol, made safe for float16.

    ::

        optimizer = LossScalingOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
        optimizer.backward(loss)  # or optimizer.scale_loss(loss).backward()
        optimizer.step()

    ``step`` divides the gradients by the scale, in float32, and is skipped if one is not finite: then no weight and no
    optimizer state changes, to the bit, and the scale backs off. With a fused optimizer that is decided on the device
    and the host reads nothing (but in the first step, in which the optimizer makes its state); with another the host
    reads one number a step.

    16-bit parameters get float32 masters: ``param_groups`` holds the masters, and each step copies them back, rounded.
    From ``unscale_``, ``accumulate`` or ``step`` on a parameter and its master share one float32 gradient.

    Hooks for state dicts belong to the wrapped optimizer; step hooks run around each call of this one's ``step``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scale: LossScale | LossScaler | None = None,
        *,
        process_group: dist.ProcessGroup | str | None = "world",
    ) -> None:
        """Wrap ``optimizer``.

        Args:
            optimizer: is used on; its ``param_groups`` and ``state`` are this one's.
            loss_scale: a rule, ``DynamicLossScale()`` if None; or the ``loss_scaler`` of another wrapper, to share its
                scale, which ``loss_scaler.update()`` updates then.
            process_group: processes that step together: all skip a step if one overflows. ``"world"``: all of them,
                where torch.distributed is initialized. None: this process alone.

        Raises:
            UnsupportedError: the optimizer is wrapped already, or has complex parameters.
            TypeError: it is no optimizer.
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
        self.process_group = process_group
        self.masters = Masters(optimizer)
        self._set_up()

    def _set_up(self) -> None:
        self.loss_scaler.rounds.join(self)
        self._searches = needs_closure(self.optimizer)
        self._fused = FusedStep()
        self._unscaled: Unscaled | None = None  # of gradients that are unscaled already
        self._epoch = 0  # counts what makes gradients others than those of the last step
        self._last: StepResult | tuple[Unscaled, int] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer.

        Raises:
            UnsupportedError: a parameter is complex.
            ValueError: a group has one of the parameters already.
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
        """Drop the gradients, of masters and of 16-bit parameters too."""
        self._forget()
        self.optimizer.zero_grad(set_to_none)
        self.masters.zero_grad()

    def model_parameters(self) -> list[torch.Tensor]:
        """The parameters of ``param_groups``, and 16-bit ones in place of their masters."""
        masters = set(map(id, self.masters.masters))
        own = [p for group in self.param_groups for p in group["params"] if id(p) not in masters]
        return [*self.masters.working, *own]

    # ---- scaling ----------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Losses) -> Losses:
        """``loss``, a tensor or a tree of tensors, times the scale; in float32 where it has 16 bits.

        Of a shared scale it is this optimizer that steps with the gradients; ``loss_scaler.scale(loss)`` is for all.

        Raises:
            LossScaleError: the gradients at hand are unscaled already, and cannot be added to.
        """
        if self._unscaled is not None:
            raise LossScaleError(
                "the gradients are unscaled already, and those of a further loss would be added scaled: call step() "
                "first, or zero_grad()."
            )
        self._epoch += 1
        return self.loss_scaler.scale(loss, self)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """``scale_loss(loss).backward(**options)``."""
        self.scale_loss(loss).backward(**options)

    def accumulate(self) -> None:
        """Add up the gradients of 16-bit parameters in float32. For micro-batches, after each backward.

        The sum of many 16-bit gradients loses small ones. Gradients of float32 parameters add up by themselves, and
        those of 16-bit parameters do from here on: they are float32 tensors, which the masters share.
        """
        self.masters.collect()

    def unscale_(self) -> None:
        """Divide the gradients by the scale, in place, once between two steps; for looking at them or changing them.

        Those of 16-bit parameters are float32 then, and the same tensors as their masters'.

        Raises:
            LossScaleError: no loss was scaled since the last step or ``zero_grad``; or, with a shared scale, this
                optimizer has stepped since its last update, or added up gradients over it.
        """
        if self.masters.masters:
            self.masters.collect()
        if self._unscaled is not None:
            return
        is_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes as long as two of the operators
        try:
            self._unscaled = unscale_(self, self.optimizer.param_groups, self.loss_scaler, self.process_group)
        finally:
            torch._C._set_grad_enabled(is_enabled)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale the gradients and clip their common norm, as ``torch.nn.utils.clip_grad_norm_``; waits for nothing.

        Returns:
            The norm before clipping, float32, no dimensions; ``last_step.grad_norm`` is this one then.
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
            closure: computes gradients with ``backward`` or ``scale_loss`` and returns the loss, not scaled. An
                optimizer that cannot step without one (LBFGS) may call it several times; if one call overflows or
                raises, the whole step is undone.

        Returns:
            What the closure returned, else what the wrapped optimizer's step does.

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
            skipped = bool(found_inf.item())
            if not skipped:
                result = self.optimizer.step()
                self._fused.note(self.optimizer)
        self._finish(skipped)
        return result

    def _search(self, closure: Callable[[], Any]) -> Any:
        seen: list[Any] = [None]

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
            inner._opt_called = True  # else its schedulers warn that it never stepped
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
        """What the last step did. Reading a value of it waits for the device.

        Raises:
            LossScaleError: there was none.
        """
        if self._last is None:
            raise LossScaleError("there was no step yet.")
        if isinstance(self._last, tuple):  # made when it is asked for, which is seldom
            unscaled, epoch = self._last
            still = GradientsOf(self.param_groups, lambda: self._epoch == epoch)
            self._last = StepResult(unscaled, still)
        return self._last

    def step_scheduler(self, scheduler: Any, *args: Any) -> None:
        """``scheduler.step(*args)``, unless the last step was skipped: a learning rate that waits for the weights."""
        if not self.last_step.skipped:
            scheduler.step(*args)

    def _forget(self) -> None:
        self._unscaled = None
        self._epoch += 1
        self.loss_scaler.rounds.drop(self)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with ``loss_scale`` (numbers) and, if there are any, ``masters`` (tensors)."""
        found = dict(self.optimizer.state_dict())
        found["loss_scale"] = self.loss_scaler.state_dict()
        if len(self.masters):
            found["masters"] = self.masters.state()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; also a bare optimizer's, or that of a ``torch.amp.GradScaler``.

        Of a bare optimizer's the scale stays as it is, and masters become the present weights. Of a GradScaler's only
        the scale and its counter are taken.

        Raises:
            LossScaleError: the masters are not those of these parameters, or no run with this rule has such a loss
                scale; nothing is loaded.
            ValueError: the groups are not those of this optimizer (raised by torch).
        """
        if "param_groups" not in state_dict:
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
