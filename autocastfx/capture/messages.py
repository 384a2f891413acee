"""What forward prints, warns of and logs: in one graph, it is said when the graph has run, in each call."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

import torch

_LOGS = frozenset(("debug", "info", "warning", "warn", "error", "critical", "log"))


@contextmanager
def messages_after_graph() -> Generator[None]:
    """While open, let Dynamo call ``print``, ``warnings.warn`` and methods of loggers behind a graph, not break it.

    Keyword arguments break it all the same, but for those of ``warnings.warn``; so do messages in a graph inside it.
    """
    from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

    functions = {*torch._dynamo.config.reorderable_logging_functions, print, warnings.warn}
    before, log = DebuggingVariable.call_function, cast("Any", LoggingLoggerVariable.call_method)

    @wraps(before)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.value is warnings.warn:  # its level names a line of the caller's, which is not there
            category = {"category": args[1]} if len(args) > 1 else {}
            named = {name: one for name, one in {**category, **kwargs}.items() if name != "stacklevel"}
            args, kwargs = [*args[:1], *filter(None, [named.pop("category", None)])], named
        return _said_behind(tx, self, args, kwargs)

    @wraps(log)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.source import AttrSource

        try:
            return log(self, tx, name, args, kwargs)  # which may be told to leave the message out
        except Unsupported:
            if name not in _LOGS or self.source is None or not isinstance(self.value, logging.Logger):
                raise
            method = DebuggingVariable(getattr(self.value, name), source=AttrSource(self.source, name))
            return _said_behind(tx, method, args, kwargs)

    replaced = (
        patch.object(DebuggingVariable, "call_function", call_function),
        patch.object(LoggingLoggerVariable, "call_method", call_method),
    )
    with torch._dynamo.config.patch(reorderable_logging_functions=functions), replaced[0], replaced[1]:
        yield


def _said_behind(tx: Any, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Have ``function``, as Dynamo knows it, called behind the graph.

    Raises:
        Unsupported: it has keyword arguments, or is called in a graph inside the graph.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import ConstantVariable

    if kwargs or tx.output.current_tracer.parent is not None:
        where = f"with {', '.join(kwargs)}" if kwargs else "in a graph inside a graph, as of activation checkpointing"
        raise cast("Any", Unsupported)(f"a call of {function.value.__name__} {where}")
    tx.output.root_tx.debug_locals.append((function, list(args)))
    return ConstantVariable.create(None)
