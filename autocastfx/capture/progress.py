"""Tell what long work is doing: a line on a terminal while it lasts, and the logger ``autocastfx``."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Progress = bool | Callable[[int], object] | None

_LOG = logging.getLogger("autocastfx")
_ERASE = "\r\x1b[K"


@contextmanager
def stage(what: str) -> Generator[None]:
    """While open, show ``what`` on standard error if that is a terminal; then log it with its time, at level INFO.

    The cursor stays at the start of the line, so that a warning overwrites it. The line is erased at the end.
    """
    on_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    started = time.perf_counter()
    if on_terminal:
        print(f"{_ERASE}autocastfx: {what} …\r", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if on_terminal:
            print(_ERASE, end="", file=sys.stderr, flush=True)
    _LOG.info("%s: %.1f s", what, time.perf_counter() - started)


@contextmanager
def counted(progress: Progress, what: str) -> Generator[Callable[[int], object]]:
    """While open, give a function that tells how many batches are done.

    Args:
        progress: True: a line on standard error; None: if that is a terminal; False: nothing. Or the function.
        what: what is done with the batches, in the line.
    """
    if callable(progress):
        yield progress
    elif progress or (progress is None and sys.stderr.isatty()):
        try:
            yield lambda done: print(f"\rautocastfx: {what}, batch {done}", end="", file=sys.stderr, flush=True)
        finally:
            print(file=sys.stderr)
    else:
        yield lambda done: None
