"""Base class of optimizers that wrap another: same groups, state and hooks, but their own step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Container
from itertools import chain
from typing import Any

import torch
import torch.optim.optimizer as _globals
from torch.optim import Optimizer

from autocastfx.errors import LossScaleError
from autocastfx.training import gradients

_HALVES = ("first_step", "second_step")  # of an optimizer that steps twice

_SHARED = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class WrappingOptimizer(Optimizer):
    """Wraps ``optimizer`` and shares its groups, state and defaults, so that schedulers and tools accept it.

    Hooks for state dicts belong to the wrapped optimizer. Step hooks belong to the wrapper and run around its ``step``.
    Other public attributes are read from the wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._wrap()

    def _wrap(self) -> None:
        """Set the attributes that ``Optimizer.__init__`` would set, sharing ``optimizer``'s state dict hooks."""
        own = self.__dict__
        own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"] = OrderedDict(), OrderedDict()
        inner = self.optimizer.__dict__  # one that wraps another itself may never have called Optimizer.__init__
        own.update({name: inner.setdefault(name, OrderedDict()) for name in _SHARED})

    def _hooked(self, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Call ``step(closure)`` between the wrapper's step hooks, in torch's manner.

        torch's global step hooks run around the wrapped optimizer's step.
        """
        args: tuple[Any, ...] = (self, closure)
        kwargs: dict[str, Any] = {}
        for before in self._optimizer_step_pre_hooks.values():
            changed = before(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        result = step(*args[1:], **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return result

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(self.optimizer, name)
        return _refuse_half(name) if name in _HALVES and callable(attribute) else attribute


def _refuse_half(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise LossScaleError(
            f"{name} would read gradients that the loss scale still multiplies: call step(closure), where the closure "
            "computes the loss again and its gradients with backward, and returns the loss."
        )

    return refuse


def needs_closure(optimizer: Optimizer) -> bool:
    """True if ``step`` requires a closure, which it may call several times."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and (closure.default is inspect.Parameter.empty or steps_twice(optimizer))


def steps_twice(optimizer: Optimizer) -> bool:
    """True for sharpness-aware minimization (SAM, Foret et al. 2021), as public packages write it.

    Its ``step`` begins with the gradients that there are, moves the weights by ``first_step``, and asks the closure for
    those at the new place.
    """
    return all(callable(getattr(optimizer, name, None)) for name in _HALVES)


def steps_by_itself(optimizer: Any, kinds: Container[type]) -> bool:
    """True if ``optimizer`` is of one of ``kinds``, its step is torch's, and nobody's hook looks at what it does."""
    step = vars(optimizer).get("step")  # replaced: by a scheduler, which only counts, or by somebody
    if type(optimizer) not in kinds or (step is not None and not hasattr(step, "_wrapped_by_lr_sched")):
        return False
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    hooks += [_globals._global_optimizer_pre_hooks, _globals._global_optimizer_post_hooks]
    return all(getattr(hook, "__module__", "").startswith("autocastfx.") for some in hooks for hook in some.values())


def steps_to_make_state(optimizer: Optimizer) -> bool:
    """True if torch.distributed.checkpoint steps only to create a state to load into: all gradients and rates are 0."""
    groups = optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(float(group.get("lr", 1)) != 0 for group in groups) or any(p.grad is None for p in trained):
        return False
    return not any(bool(grad.any().item()) for grad in gradients.present(groups))


# Step a fused optimizer that decides on the device whether to skip the step.

_TAKES_FOUND_INF = "_step_supports_amp_scaling"  # torch sets it on fused optimizers


class FusedStep:
    """Steps a fused optimizer, and tracks which parameters have optimizer state.

    A step that creates state must not be skipped on the device: the new state would stay, and SGD would use
    uninitialized memory as its momentum.
    """

    def __init__(self) -> None:
        self._warm: dict[int, torch.Tensor] = {}  # by id; it keeps them alive, so that no id is reused

    def decides(self, optimizer: Optimizer) -> bool:
        """True if ``optimizer`` takes ``found_inf`` and has all the state that its next step needs."""
        if not getattr(optimizer, _TAKES_FOUND_INF, False):
            return False
        groups = optimizer.param_groups
        if not all(group.get("fused", True) for group in groups):
            return False
        parameters = chain.from_iterable([group["params"] for group in groups])
        is_warm = self._warm.__contains__  # in maps it runs no Python frame per parameter
        return all(map(is_warm, map(id, parameters))) or all(map(is_warm, map(id, _with_gradients(optimizer))))

    def step(self, optimizer: Any, found_inf: torch.Tensor) -> Any:
        """Call ``optimizer.step()``, which changes nothing if ``found_inf`` is 1."""
        optimizer.found_inf = found_inf
        try:
            return optimizer.step()
        finally:
            del optimizer.found_inf

    def note(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped and was not skipped."""
        if hasattr(optimizer, _TAKES_FOUND_INF):
            self._warm.update((id(p), p) for p in _with_gradients(optimizer))

    def note_loaded(self, optimizer: Optimizer) -> None:
        """Note that a state was loaded into ``optimizer``."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._warm = {id(p): p for p in parameters if p in optimizer.state}


def _with_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
