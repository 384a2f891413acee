"""The hooks of a model's modules: a graph holds what they do to tensors in forward, and does not call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import getmro
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

from autocastfx.errors import CaptureError

__all__ = [
    "derived_by_hooks",
    "has_hooks",
    "later_hooks",
    "later_process_hooks",
    "names_of",
    "refuse_backward_hooks",
    "unfollowed",
    "unfollowed_names",
]

_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_EVERY = "every module of the process"  # as torch.nn.modules.module.register_module_forward_hook registers them
# Hooks of these places do nothing that a graph lacks: checks of an exported program, and the outputs of layers that a
# model of transformers is asked for. What fully_shard puts on a submodule is refused where it matters.
_NOTHING_LACKS = ("torch.export.", "torch._export.", "transformers.utils.output_capturing", "torch.distributed.")
# These make a weight from others, which a graph does as well, if they are there when it is captured.
_WEIGHTS = ("torch.nn.utils.", "torch.nn.modules.lazy")


def has_hooks(module: nn.Module) -> bool:
    """True if ``module`` has hooks on its call or on its backward pass."""
    own = module.__dict__
    return any(map(own.get, (*_FORWARD, *_BACKWARD)))


def later_hooks(module: nn.Module, number: int) -> bool:
    """True if ``module`` has hooks of this number and more, which torch counts up, and a graph lacks what they do."""
    return any(at >= number for at, _ in _hooks(vars(module), (*_FORWARD, *_BACKWARD), _NOTHING_LACKS))


def later_process_hooks(number: int) -> list[str]:
    """Name all modules, if hooks of this number and more have been registered for them all."""
    return _named_of_process((*_FORWARD, *_BACKWARD), number)


def unfollowed(module: nn.Module) -> bool:
    """True if ``module`` has forward hooks that may do more than to compute with tensors."""
    return any(_hooks(vars(module), _FORWARD, (*_NOTHING_LACKS, *_WEIGHTS)))


def unfollowed_names(model: nn.Module) -> list[str]:
    """Name the modules with forward hooks that may do more than to compute with tensors."""
    return [*names_of(model, unfollowed), *_named_of_process(_FORWARD)]


def derived_by_hooks(module: nn.Module) -> set[str]:
    """Return the attributes of ``module`` that a hook of torch's makes anew in each call, as a weight norm's weight."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if _is_of(hook, _WEIGHTS)]
    names = (getattr(hook, name, None) for hook in hooks for name in ("name", "_tensor_name"))
    return {name for name in names if isinstance(name, str)}


def names_of(model: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of the modules in ``model`` for which ``holds`` is true, for messages."""
    return [repr(name) if name else "the model" for name, module in model.named_modules() if holds(module)]


def refuse_backward_hooks(model: nn.Module) -> None:
    """Refuse modules with backward hooks, which would not run.

    Raises:
        CaptureError: a module has one.
    """
    names = names_of(model, lambda module: any(_hooks(vars(module), _BACKWARD, _NOTHING_LACKS)))
    if names := [*names, *_named_of_process(_BACKWARD)]:
        raise CaptureError(
            f"backward hooks on {', '.join(names)} would not run: a graph calls no modules, and gradients would be "
            "those without hooks. Register them on the converted model itself, or convert in place, with "
            "autocastfx.enable, which keeps all hooks."
        )


def _named_of_process(tables: Iterable[str], number: int = 0) -> list[str]:
    hooks = _hooks(vars(of_all_modules), [f"_global{table}" for table in tables], _NOTHING_LACKS)
    return [_EVERY] if any(at >= number for at, _ in hooks) else []


def _hooks(owner: Mapping[str, Any], tables: Iterable[str], left_out: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    for table in tables:
        for number, hook in (owner.get(table) or {}).items():
            if not _is_of(hook, left_out):
                yield number, hook


def _is_of(hook: Any, places: tuple[str, ...]) -> bool:
    """True if a hook is a function of one of these modules, or an instance of a class of one."""
    called: Any = hook.func if isinstance(hook, partial) else hook
    homes = (getattr(called, "__module__", None), *(kind.__module__ for kind in getmro(type(called))))
    return any(str(home).startswith(places) for home in homes)
