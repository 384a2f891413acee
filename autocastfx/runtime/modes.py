"""The training flags of a model's modules: those that its own ``train`` and ``eval`` would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from autocastfx.capture.leave_intact import isolated

_SWITCHES: tuple[Callable[[nn.Module], object], ...] = (lambda model: model.eval(), lambda model: model.train())


def modes_after(model: nn.Module, *, training: bool) -> tuple[bool, ...]:
    """Return the mode of each module after ``model.train()``, or ``model.eval()``; the model stays as it is.

    A switch that fails, or changes which modules there are, counts as one that switches all modules alike.
    """
    modules = list(model.modules())
    if _is_overridden(modules):
        with isolated(model):
            try:
                _SWITCHES[training](model)
            except Exception:  # code of the model's own, which may need values: the switch itself will raise, or work
                return (training,) * len(modules)
            if list(model.modules()) == modules:
                return tuple(module.training for module in modules)
    return (training,) * len(modules)


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Give each module its training flag."""
    for module, flag in zip(modules, modes, strict=True):
        module.training = flag


def _is_overridden(modules: Sequence[nn.Module]) -> bool:
    own = (getattr(module, name) for module in modules for name in ("train", "eval"))
    return any(getattr(method, "__func__", None) not in (nn.Module.train, nn.Module.eval) for method in own)
