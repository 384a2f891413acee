"""An optimizer that stands for another: the same groups, state and hooks, with a step of its own."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from autocastfx.training import gradients

__all__ = ["WrappingOptimizer", "needs_closure", "steps_to_make_state"]

_SHARED = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class WrappingOptimizer(Optimizer):
    """An optimizer whose groups, state and defaults are those of ``optimizer``, so that schedulers and tools take it.

    Hooks for state dicts belong to the wrapped optimizer. Step hooks are this one's own, and run around its ``step``.
    Whatever else the wrapped optimizer has is found here too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._wrap()

    def _wrap(self) -> None:
        """Take the place of ``optimizer``: what Optimizer.__init__ does for one with parameters of its own."""
        own = self.__dict__
        own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"] = OrderedDict(), OrderedDict()
        own.update({name: getattr(self.optimizer, name) for name in _SHARED})

    def _hooked(self, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """``step(closure)`` between this one's step hooks, as torch runs them.

        Hooks for the steps of all optimizers run with the wrapped one's.
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
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure, which it may call as often as it likes."""
    found = inspect.signature(type(optimizer).step).parameters.get("closure")
    return found is not None and found.default is inspect.Parameter.empty


def steps_to_make_state(optimizer: Optimizer) -> bool:
    """True if it is torch.distributed.checkpoint that steps, to have a state to load: all gradients and rates are 0."""
    groups = optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(float(group.get("lr", 1)) != 0 for group in groups) or any(p.grad is None for p in trained):
        return False
    return not any(bool(grad.any().item()) for grad in gradients.present(groups))
