"""The modes that a model's own ``train`` and ``eval`` give its modules, and those that its parts are given later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.leave_intact import intact
from autocastfx.errors import UnsupportedError

__all__ = ["OriginalModes", "Switched", "foreseen", "set_modes", "switch"]

Modes = tuple[bool, ...]
_Held = Callable[[], Mapping[str, torch.Tensor]]
_SWITCHES: tuple[Callable[[nn.Module], object], ...] = (lambda model: model.eval(), lambda model: model.train())


@dataclass(frozen=True)
class Switched:
    """What a switch to training, or to evaluation, does to a model.

    Attributes:
        modes: the training flag of each module afterwards.
        changes: True if it changes attributes too, on which graphs may depend, or if that is unknown.
    """

    modes: Modes
    changes: bool = False


class OriginalModes:
    """Follows the modes that parts of the original are given (``model.backbone.eval()``) after the conversion.

    The mode of the original as a whole is its own. Calls that ``torch.compile`` compiled do not look: there, give the
    mode to the converted model's part.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.modules = tuple(model.modules()) if model is not None else ()
        self.seen = self._now()

    def _now(self) -> list[bool]:
        return [module.training for module in self.modules]

    def follow(self, own: Sequence[nn.Module]) -> None:
        """Give ``own``, the modules of the converted model, the modes that parts were given since the last look."""
        now = self._now()
        if now != self.seen:
            was, self.seen = self.seen, now
            is_switch = now[0] != was[0]
            for module, flag, before in zip(own, now, was, strict=True):
                if flag != (now[0] if is_switch else before):
                    module.training = flag

    def forget(self) -> None:
        """Let what was done to the original so far be of no account: all modules are given modes anew."""
        self.seen = self._now()


def foreseen(model: nn.Module, *, training: bool) -> Switched:
    """Return what ``model.train()``, or ``model.eval()``, would do; the model stays as it is."""
    modules = list(model.modules())
    if not _is_overridden(modules):
        return Switched((training,) * len(modules))
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    stand_ins = {name: _without_values(tensor) for name, tensor in named}
    with intact(model, [m.training for m in modules], stand_ins):
        before = _attributes(modules)
        try:
            _SWITCHES[training](model)
        except Exception:  # code of the model's own, which may need values: the switch itself will raise, or work
            return Switched((training,) * len(modules), changes=True)
        is_same = list(model.modules()) == modules and _attributes(modules) == before
        return Switched(tuple(m.training for m in modules), changes=not is_same)


def switch(own: Sequence[nn.Module], model: nn.Module, held: _Held, *, training: bool) -> bool:
    """Give ``own`` the modes that ``model.train()``, or ``model.eval()``, gives the modules of ``model``.

    What else that does, it does: freeze parameters, set attributes. The modes of ``model`` stay as they are.

    Args:
        own: the modules of a converted model.
        model: the original.
        held: gives the parameters and buffers of the converted model, by name.
        training: which of the two.

    Returns:
        False if that is ``nn.Module``'s own, which switches all modules alike; nothing is done then.

    Raises:
        UnsupportedError: it adds or removes modules.
    """
    modules = list(model.modules())
    if not _is_overridden(modules):
        return False
    theirs = [module.training for module in modules]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        set_modes(modules, [one.training for one in own])
        tensors = held()
        for prefix, module in model.named_modules():
            for table in (cast("dict[str, Any]", module._parameters), cast("dict[str, Any]", module._buffers)):
                for name, tensor in table.items():
                    new = tensors.get(f"{prefix}.{name}" if prefix else name, tensor)
                    if new is not tensor:
                        replaced.append((table, name, tensor))
                        table[name] = new
        _SWITCHES[training](model)
        if list(model.modules()) != modules:
            raise UnsupportedError(
                f"{'train' if training else 'eval'}() of {type(model).__name__} adds or removes modules, which a "
                "converted model cannot follow: switch the original, and convert it again."
            )
        set_modes(own, [module.training for module in modules])
        return True
    finally:
        set_modes(modules, theirs)
        for table, name, tensor in replaced:
            table[name] = tensor


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Give each module its training flag."""
    for module, flag in zip(modules, modes, strict=True):
        module.training = flag


def _is_overridden(modules: Sequence[nn.Module]) -> bool:
    own = (getattr(module, name) for module in modules for name in ("train", "eval"))
    return any(getattr(method, "__func__", None) not in (nn.Module.train, nn.Module.eval) for method in own)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    bare = torch.empty_like(tensor, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _attributes(modules: Sequence[nn.Module]) -> list[dict[str, int]]:
    return [{name: id(held) for name, held in vars(m).items() if name != "training"} for m in modules]
