"""An optimizer that scales the loss, skips steps that overflowed, and keeps float32 masters of 16-bit weights."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autocastfx.errors import (
    ArgumentError,
    ArgumentTypeError,
    LossScaleError,
    ScaledGradientsWarning,
    UnsupportedError,
    listed,
)
from autocastfx.training import gradients
from autocastfx.training.gradients import SHARDED, WORLD, Agreeing, agree
from autocastfx.training.loss_scale import DynamicLossScale, LossScale, is_capturing
from autocastfx.training.loss_scaler import LossScaler
from autocastfx.training.masters import Masters
from autocastfx.training.split_masters import SplitMasters
from autocastfx.training.wrapping_optimizer import (
    FusedStep,
    WrappingOptimizer,
    needs_closure,
    steps_to_make_state,
    steps_twice,
)

# What is found when gradients are divided by the loss scale, kept until the step.


@dataclass(slots=True)
class Unscaled:
    """Findings about unscaled gradients.

    Attributes:
        found_inf: float32, no dimensions: 1 if a gradient is not finite in any process, else 0.
        scale: float32, no dimensions; the scale that they were divided by.
        is_empty: True if no process has a gradient.
        norm: their norm before clipping; None if they were not clipped by norm.
    """

    found_inf: torch.Tensor
    scale: torch.Tensor
    is_empty: bool = False
    norm: torch.Tensor | None = None


# Save what an optimizer's step changes, so that a failed step can be undone.


@contextmanager
def undone_if_it_fails(optimizer: Optimizer, masters: Masters) -> Generator[None]:
    """An exception inside restores the optimizer's weights and state, and the 16-bit parameters of masters."""
    masters.follow()
    weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    state = {p: copy.deepcopy(own) for p, own in optimizer.state.items()}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, weight in weights:
                parameter.copy_(weight)
        masters.publish()
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


# Notice that gradients are changed while they are still scaled, as when they are clipped too early.


class ScaledChange:
    """Watches one gradient, from the backward pass that adds to it until gradients are unscaled.

    What clips, clips all gradients, so one is enough. A gradient that was replaced is not noticed. Where processes
    train together none is watched, because they average gradients in place.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._watched = next((p for p in parameters if p.requires_grad and p.is_leaf), None)
        self._seen: list[tuple[int, int] | None] = []  # one at most
        if self._watched is not None:
            seen = self._seen  # the hook must not keep self alive

            def note(parameter: torch.Tensor) -> None:
                seen[:] = [_version(parameter)]

            weakref.finalize(self, self._watched.register_post_accumulate_grad_hook(note).remove)

    def warn(self, remedy: str) -> None:
        """Warn if the gradient was changed in place since it was computed. Call it before gradients are unscaled."""
        seen = self._seen.pop() if self._seen else None
        if seen is None or self._watched is None or (dist.is_available() and dist.is_initialized()):
            return
        now = _version(self._watched)
        if now is not None and now[0] == seen[0] and now[1] != seen[1]:
            warnings.warn(
                "gradients were changed while they were multiplied by the loss scale. If they were clipped, the limit "
                f"was too small by that factor: {remedy}. If they were divided by a number, all is well.",
                ScaledGradientsWarning,
                stacklevel=4,
            )


def _version(parameter: torch.Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.data_ptr(), grad._version


# The result of an optimizer step, read from the device on demand.


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step of ``LossScalingOptimizer``. Only reading a value waits for the device."""

    _unscaled: Unscaled
    _groups: Callable[[], Sequence[dict[str, Any]]]  # with the gradients of the step, or raises

    @property  # not cached: the replay of a CUDA graph that holds the step makes them anew
    def found_inf(self) -> bool:
        """True if a gradient was not finite in any process; False if the loss scale checks no gradients."""
        return bool(self._unscaled.found_inf.item())

    @property
    def skipped(self) -> bool:
        """True if the step was skipped and changed nothing."""
        return self.found_inf

    @property
    def scale(self) -> float:
        """The factor by which the loss had been multiplied."""
        return float(self._unscaled.scale.item())

    @cached_property
    def grad_norm(self) -> float:
        """The 2-norm of the unscaled gradients; after ``clip_grad_norm_``, the norm that it returned.

        Raises:
            LossScaleError: the step's gradients are gone.
        """
        norm = self._unscaled.norm
        return float((norm if norm is not None else gradients.norm(self._groups())).item())

    @cached_property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters of this process whose gradients were not finite.

        Raises:
            LossScaleError: the step's gradients are gone.
        """
        return gradients.culprits(self._groups())

    def __repr__(self) -> str:
        return f"StepResult(skipped={self.skipped}, scale={self.scale:g})"


def exhausted(groups: Sequence[dict[str, Any]], scale: float) -> LossScaleError:
    """Make the error for a step that overflowed at the smallest scale."""
    names = gradients.culprits(groups)
    where = f"of {listed(names, 10)}" if names else "of another process's parameters"
    return LossScaleError(
        f"the gradients {where} are not finite, and the loss scale is at its floor ({scale:g}) already: scaling is not "
        "the cause. The step was skipped and no weight changed. Look for Inf or NaN in the data, the loss and these "
        "parameters: autocastfx.find_overflow(amp_model, *inputs) names the op at which they begin in a call, and "
        "autocastfx.watch(amp_model) does in each skipped step. Or lower the learning rate, or use bfloat16."
    )


def overflowed(found_inf: torch.Tensor) -> bool:
    """Ask the device whether gradients overflowed: ``found_inf`` is a float32 scalar, above 0 if they did.

    Raises:
        LossScaleError: a CUDA graph is being captured, which cannot ask.
    """
    if is_capturing([found_inf]):
        raise LossScaleError(
            "whether to skip this step would be decided by the host, which a CUDA graph cannot ask. Use a fused "
            "optimizer (fused=True), and capture after a step that was not skipped (optimizer.last_step.skipped): the "
            "optimizer makes its state in the first one."
        )
    return bool(found_inf.item())


Losses = TypeVar("Losses")
_HOLDS_MASTERS = "_autocastfx_holds_masters"  # an attribute of the wrapped optimizer
FLOAT32 = "float32"
_MASTERS: Mapping[str, Callable[[Optimizer], Masters]] = {FLOAT32: Masters, "split": SplitMasters}
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
        masters: str = FLOAT32,
    ) -> None:
        """Wrap ``optimizer``.

        Args:
            optimizer: the wrapper shares its ``param_groups`` and ``state``.
            loss_scale: a rule (None: ``DynamicLossScale()``), or the ``loss_scaler`` of another wrapper, to share its
                scale; then call ``loss_scaler.update()`` after the steps of all.
            process_group: processes that skip a step if one of them overflows. ``"sharded"``: those that hold other
                parts of these parameters, as under FSDP and tensor parallelism; under DDP gradients, and so overflows,
                are the same in all. ``"world"``: all processes, which then must step alike. None: this one alone.
            masters: of 16-bit parameters. ``"float32"``: kept beside them, six bytes for both. ``"split"``, of bfloat16
                ones: the parameter and the 16 bits that it lacks, four bytes; a master exists while it is updated, some
                parameters at a time, and parameters are rounded half away from zero instead of half to even.

        Raises:
            UnsupportedError: the optimizer is wrapped already, or has complex parameters; or ``masters="split"`` and a
                parameter is float16, or the optimizer needs a closure.
            TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
            ValueError: ``process_group`` or ``masters`` is another word; or nothing can be split.
        """
        if isinstance(optimizer, LossScalingOptimizer):
            raise UnsupportedError(
                "the optimizer scales its loss already: wrap the one that it wraps, or use it as it is."
            )
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"LossScalingOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if getattr(optimizer, _HOLDS_MASTERS, False):
            raise UnsupportedError(
                "the optimizer was wrapped before, and holds the masters of that wrapper instead of the model's "
                "parameters: use that wrapper, or make the optimizer anew."
            )
        if masters not in _MASTERS:
            raise ArgumentError(f"masters is one of {', '.join(map(repr, _MASTERS))}, not {masters!r}")
        if isinstance(process_group, str) and process_group not in (SHARDED, WORLD):
            raise ArgumentError(
                f"process_group is {SHARDED!r}, {WORLD!r}, a process group or None, not {process_group!r}."
            )
        for group in optimizer.param_groups:
            gradients.refuse_complex(group)
        super().__init__(optimizer)
        is_live = isinstance(loss_scale, LossScaler)
        self.loss_scaler = loss_scale if is_live else LossScaler(loss_scale or DynamicLossScale())
        self.process_group = process_group
        self.masters = _MASTERS[masters](optimizer)
        self._note_masters()
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
            self.masters.refuse_known(added, self.optimizer)
        except (UnsupportedError, ValueError):
            self.optimizer.param_groups.pop()
            raise
        self.masters.adopt(added, self.optimizer)
        self._note_masters()

    def _note_masters(self) -> None:
        setattr(self.optimizer, _HOLDS_MASTERS, len(self.masters) > 0)

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
            self._unscaled = self._divided()

    def _divided(self) -> Unscaled:
        """Divide the gradients by the scale in place; does nothing if the scale checks no gradients."""
        scaler, groups, cpu = self.loss_scaler, self.optimizer.param_groups, torch.device("cpu")
        if not scaler.rule.is_checked:
            return Unscaled(torch.zeros((), device=cpu), torch.ones((), device=cpu))
        self.change.warn("call optimizer.clip_grad_norm_, or optimizer.unscale_() before you clip")
        grads = gradients.present(groups)
        if grads:
            scaler.rounds.check(self)
        scale = scaler.state(grads[0].device if grads else cpu).scale.clone()
        found_inf = torch.zeros_like(scale) if grads else torch.full_like(scale, -1)  # less than any found by others
        gradients.unscale_(grads, scale.reciprocal(), found_inf)
        agree(found_inf, self.process_group, groups)
        if grads:
            return Unscaled(found_inf, scale)
        is_empty = bool(found_inf.item() < 0)
        return Unscaled(found_inf.clamp_(min=0), scale, is_empty)

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
        if torch.compiler.is_compiling():  # whether it skips depends on numbers: a compiler runs it as it is
            as_it_is: Any = torch.compiler.disable(self.step)
            return as_it_is(closure)
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return self._hooked(self._step, closure)
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None and self._searches:
            return self._search(closure)
        if closure is None and not self.optimizer.state and self._makes_state():
            return self.masters.step(self.optimizer, self.optimizer.step)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.unscale_()
        result = self._step_or_skip(cast("Unscaled", self._unscaled).found_inf)
        return loss if closure is not None else result

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        is_method = getattr(attribute, "__self__", None) is self.optimizer
        return partial(self._call, name, attribute) if is_method else attribute

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that may read gradients, or write masters: to swap weights for their averages, for example."""
        if name not in ("train", "eval") and self._unscaled is None and self.loss_scaler.rounds.is_scaled(self):
            where = f"call it after step(), zero_grad() or unscale_(); or optimizer.optimizer.{name}, if it reads none."
            raise LossScaleError(f"{name} may read gradients that the loss scale still multiplies: {where}")
        self.masters.collect()
        return self.masters.call(self, partial(method, *args, **kwargs))

    def _makes_state(self) -> bool:
        has_loss = self._unscaled is not None or self.loss_scaler.rounds.is_scaled(self)
        return self.loss_scaler.rule.is_checked and not has_loss and steps_to_make_state(self.optimizer)

    def _step_or_skip(self, found_inf: torch.Tensor) -> Any:
        result, skipped = None, None
        if not self.loss_scaler.rule.is_checked:
            result, skipped = self.masters.step(self.optimizer, self.optimizer.step), False
        elif self._fused.decides(self.optimizer):
            result = self.masters.step(self.optimizer, lambda: self._fused.step(self.optimizer, found_inf))
        else:
            skipped = overflowed(found_inf)
            if not skipped:
                result = self.masters.step(self.optimizer, self.optimizer.step)
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
            with undone_if_it_fails(self.optimizer, self.masters):
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
            self._last = StepResult(unscaled, partial(self._groups_of, epoch))
        return self._last

    def _groups_of(self, epoch: int) -> Sequence[dict[str, Any]]:
        """Return the groups, while their gradients are those of the step of this epoch."""
        if self._epoch != epoch or all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise LossScaleError(
                "the gradients of that step are gone: read last_step.grad_norm and last_step.culprits before "
                "zero_grad() and the next loss, or call clip_grad_norm_ before step(), whose norm is kept."
            )
        return self.param_groups

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
        state = dict(self.optimizer.state_dict())
        state["loss_scale"] = self.loss_scaler.state_dict()
        if len(self.masters):
            state["masters"] = self.masters.state()
        return state

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
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key not in _OWN})
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
