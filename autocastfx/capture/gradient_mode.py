"""Whether code that Dynamo captures asks if gradients are recorded, or switches that."""

from __future__ import annotations

import threading
from typing import Any


class _Asked(threading.local):
    yes = False


_ASKED = _Asked()


def asks_for_gradients() -> bool:
    """Return whether the code that this thread captures has done so, for the graph that a backend is given."""
    asked, _ASKED.yes = _ASKED.yes, False
    return asked


class _Noting:
    """Stands for the guard that Dynamo takes where code asks or switches, and notes that it is taken."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def __get__(self, instance: object, owner: type) -> Any:
        _ASKED.yes = True
        return self.guard


def asking_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name."""
    from torch._dynamo.variables.ctx_manager import GradModeVariable

    return [(GradModeVariable, "_guards_singleton", _Noting(GradModeVariable._guards_singleton))]
