"""Tell what long work is doing: a line on a terminal while it lasts, and the logger ``autocastfx``."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = bool | Callable[[int], object] | None

_LOG = logging.getLogger("autocastfx")
_ERASE = "\r\x1b[K"


def _is_terminal(stream: object) -> bool:  # it may be missing, only take text, or be closed
    try:
        return bool(getattr(stream, "isatty", bool)())
    except ValueError:
        return False


# The seconds of each part of the work that this thread does, by the part's name, while someone asks for them.
_SECONDS: ContextVar[dict[str, float] | None] = ContextVar("autocastfx_seconds", default=None)


@contextmanager
def stage(what: str, part: str = "", *, is_logged: bool = True) -> Generator[None]:
    """While open, show ``what`` on standard error if that is a terminal; then log it with its time, at level INFO.

    The cursor stays at the start of the line, so that a warning overwrites it. The line is erased at the end.

    Args:
        what: the work, in the line and in the log.
        part: of which part of :func:`parts` it is; empty: of none.
        is_logged: False: it is shown alone.
    """
    on_terminal = _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
    started = time.perf_counter()
    if on_terminal:
        print(f"{_ERASE}autocastfx: {what} …\r", end="", file=sys.stderr, flush=True)
    seconds = _SECONDS.get()
    inside = _SECONDS.set(None if part else seconds)  # a part of this part counts once
    try:
        yield
    finally:
        _SECONDS.reset(inside)
        if on_terminal:
            print(_ERASE, end="", file=sys.stderr, flush=True)
        spent = time.perf_counter() - started
        if seconds is not None and part:
            seconds[part] = seconds.get(part, 0.0) + spent
    if is_logged:
        _LOG.info("%s: %.1f s", what, spent)


_LONG = 2.0  # seconds of a capture, in the middle of other work, that are told of


@contextmanager
def capture_shown(what: str, again: Callable[[], str]) -> Generator[None]:
    """While open, show that ``what`` is captured; of one more graph that has taken long, tell in the log, as a warning.

    Args:
        what: the model or function.
        again: called at the end: why there is one more graph; empty for a first one.
    """
    started = time.perf_counter()
    with stage(f"capturing {what}", is_logged=False):
        yield
    spent = time.perf_counter() - started
    if spent >= _LONG and (why := again()):
        _LOG.warning("captured %s again, which took %.0f s: %s", what, spent, why)


@contextmanager
def parts(done: str) -> Generator[None]:
    """Log, when the work is done, how long it took and each part of it: ``converted Net in 4.1 s: capture 2.9, …``.

    Work inside of other such work is a line of its own, and no part of the other.

    Args:
        done: what is done, at the end.
    """
    seconds, started = dict[str, float](), time.perf_counter()
    token = _SECONDS.set(seconds)
    try:
        yield
    finally:
        _SECONDS.reset(token)
    each = ", ".join(f"{part} {spent:.1f}" for part, spent in seconds.items())
    _LOG.info("%s in %.1f s%s", done, time.perf_counter() - started, each and f": {each}")


@contextmanager
def counted(progress: Progress, what: str) -> Generator[Callable[[int], object]]:
    """While open, give a function that tells how many batches are done.

    Args:
        progress: True: a line on standard error; None: if that is a terminal; False: nothing. Or the function.
        what: what is done with the batches, in the line.
    """
    if callable(progress):
        yield progress
    elif progress or (progress is None and _is_terminal(sys.stderr)):
        try:
            yield lambda done: print(f"\rautocastfx: {what}, batch {done}", end="", file=sys.stderr, flush=True)
        finally:
            print(file=sys.stderr)
    else:
        yield lambda done: None


# What torch logs of a failed trace.

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
