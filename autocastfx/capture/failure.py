"""Say in a line where code fails, and silence what torch logs of it in tens."""

from __future__ import annotations

import linecache
import logging
from collections.abc import Generator
from contextlib import contextmanager

_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.variables.builtin",
    "torch._guards",
)
_REPEATED = (
    *("Unable to find user code", "failed while attempting to run meta", "Graph break from"),
    *("Error while creating guard", "Created at"),
)


@contextmanager
def quiet_logs() -> Generator[None, None, None]:
    """Silence what torch logs of a failed trace or a broken graph, each in tens of lines; we tell it in one message."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for log in loggers:
        log.addFilter(_is_of_use)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_REPEATED)


def place(filename: str, number: int) -> str:
    """Write a line of code as file, number and text."""
    line = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {line}" if line else f"{filename}:{number}"
