"""Tell the version, complete the command line, and let Ctrl-C end the command, before imports that take seconds."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from autocastfx.cli.completion import complete

_WORDS = "autocastfx: interrupted"
_CODE = 130


def begin_command(version: str) -> None:
    """If this process is the command ``autocastfx``, let Ctrl-C end it until :func:`raise_when_interrupted`.

    Only the import of torch and of this package runs meanwhile, so there is nothing to clean up. Asked for its version
    alone, or by a shell for completions, the command answers and ends.
    """
    if _is_command():
        if "_ARGCOMPLETE" in os.environ:
            complete()
        if sys.argv[1:] == ["--version"]:
            print(f"autocastfx {version}")
            sys.exit(0)
        signal.signal(signal.SIGINT, _end)


def raise_when_interrupted() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, as commands and scripts expect."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted() -> int:
    """Say so, and return the exit code."""
    print(_WORDS, file=sys.stderr)
    return _CODE


def _end(*_: object) -> None:
    os.write(2, f"{_WORDS}\n".encode())
    os._exit(_CODE)  # an exception would be shown with the traceback of the import


def _is_command() -> bool:
    """True for ``python -m autocastfx``, which imports the package first, and for the installed command."""
    if sys.argv[:1] != ["-m"]:
        return bool(sys.argv) and Path(sys.argv[0]).stem in ("autocastfx", "autocastfx-script")
    given = sys.orig_argv[1:]
    return "autocastfx" in given[given.index("-m") + 1 :][:1] if "-m" in given else "-mautocastfx" in given
