"""Have a graph of Dynamo's captured again once a module in it gets its first hook, which torch does not see to."""

from __future__ import annotations

__all__ = ["guard_hooks"]


class _Restore:
    """Undoes what :func:`guard_hooks` has set, at the end of a compilation."""

    def __init__(self) -> None:
        self.is_due = False

    def __call__(self, _: object) -> None:
        from torch._dynamo import config

        if self.is_due:
            config.skip_nnmodule_hook_guards, self.is_due = True, False


_RESTORE = _Restore()


def guard_hooks() -> None:
    """Let the guards of the graph that is being compiled hold for modules without hooks, until they get one.

    A backend calls this: Dynamo makes the guards after the backend has returned. By default it makes none for modules
    without hooks, and hooks that they get later never run.
    """
    from torch._dynamo import config
    from torch._dynamo.callback import callback_handler

    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards, _RESTORE.is_due = False, True
        if _RESTORE not in callback_handler.end_callbacks:  # torch._dynamo.reset() drops all
            callback_handler.register_end_callback(_RESTORE)
