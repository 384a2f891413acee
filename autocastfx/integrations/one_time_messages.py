"""Give a message that is given once while Dynamo captures the call, where Dynamo would break the graph for it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

__all__ = ["one_time_messages"]

_CACHED = type(lru_cache(lambda: None))
_LOCK = threading.Lock()


@contextmanager
def one_time_messages() -> Generator[None]:
    """Let graphs run through ``logger.warning_once(...)`` and methods of loggers like it.

    Such a method has a cache, and runs once for the same arguments: transformers makes them by ``functools.lru_cache``.
    It is called while the graph is captured, so the message is given as often as it would be. Methods without a cache,
    arguments that are no constants and results other than None break the graph, as without this.
    """
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    loggers: Any = LoggingLoggerVariable
    with _LOCK:  # the last of all threads and calls in calls gives Dynamo its own method back
        now = loggers.call_method
        users, own = getattr(now, "users", 0), getattr(now, "__wrapped__", now)
        if not users:
            loggers.call_method = _calling_once(own)
        loggers.call_method.users = users + 1
    try:
        yield
    finally:
        with _LOCK:
            loggers.call_method.users -= 1
            if not loggers.call_method.users:
                loggers.call_method = own


def _calling_once(before: Any) -> Any:
    """Return a method for Dynamo's loggers, which calls those that run just once where ``before`` breaks the graph."""

    @wraps(before)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.variables import ConstantVariable

        try:
            return before(self, tx, name, args, kwargs)  # which may be told to leave the message out
        except Unsupported:
            method = getattr(self.value, name, None)
            has_cache = isinstance(getattr(method, "__func__", None), _CACHED)
            if method is None or not has_cache or not all(c.is_python_constant() for c in (*args, *kwargs.values())):
                raise
            named = {key: one.as_python_constant() for key, one in kwargs.items()}
            if method(*(one.as_python_constant() for one in args), **named) is not None:
                raise
            return ConstantVariable.create(None)

    return call_method
