"""Tell of hooks on modules that calls of a converted model do not run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn
from torch.utils.hooks import RemovableHandle

from autocastfx.capture.python_state import has_hooks, later_hooks, later_process_hooks, names_of, unfollowed_names
from autocastfx.errors import StateWarning

__all__ = ["HookWatch"]


class HookWatch:
    """The hooks that a converted model has told of, each module once.

    torch numbers all hooks in a process, so that one comparison says whether there is a new one.
    """

    def __init__(self) -> None:
        self._seen = RemovableHandle.next_id
        self._captured: set[str] = set()
        self._late: set[str] = set()

    @property
    def is_due(self) -> bool:
        """True if hooks have been registered, somewhere in the process, since the last look."""
        return self._seen != RemovableHandle.next_id

    def tell_captured(self, model: nn.Module | None) -> None:
        """Warn of the forward hooks on modules of ``model``, which has just been captured."""
        if names := _new(unfollowed_names(model) if model is not None else (), self._captured):
            warnings.warn(
                f"hooks on {names} ran while the model was captured. The graph does to tensors what they did; calls of "
                "the converted model do not run them. autocastfx.enable converts in place, and keeps hooks.",
                StateWarning,
                stacklevel=2,
            )

    def tell_late(self, owner: nn.Module, own: Sequence[nn.Module], model: nn.Module | None) -> None:
        """Warn of hooks that have come since the last look.

        Args:
            owner: the converted model, whose own hooks run.
            own: its modules, which it does not call.
            model: the original, if it is at hand and has been captured.
        """
        since, self._seen = self._seen, RemovableHandle.next_id

        def is_late(module: nn.Module) -> bool:
            return module is not owner and later_hooks(module, since)

        others = model.modules() if model is not None else ()
        every = later_process_hooks(since)
        if not every and not any(map(is_late, filter(has_hooks, chain(own, others)))):
            return
        named = names_of(model, is_late) if model is not None else []
        if names := _new([*named, *names_of(owner, is_late), *every], self._late):
            warnings.warn(
                f"hooks on {names} came after the model was converted, and its calls do not run them: a graph calls no "
                "modules. Register them on the converted model itself, whose own hooks run, or convert in place, with "
                "autocastfx.enable, which follows hooks.",
                StateWarning,
                stacklevel=2,
            )


def _new(names: Iterable[str], told: set[str]) -> str:
    """Return the names that are not in ``told``, to which they are added, as one text."""
    found = [name for name in dict.fromkeys(names) if name not in told]
    told.update(found)
    return ", ".join(found)
