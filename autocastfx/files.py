"""Read text and JSON with clear errors, and write files whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["check_writable", "parsed_json", "read_whole", "replacing", "write_whole"]


# Read text files with clear errors, and write them whole or not at all.


def read_whole(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        OSError: the file cannot be read, or the path is invalid.
        UnicodeDecodeError: the file is not UTF-8 text.
    """
    _check_path(path)
    return path.read_text(encoding="utf-8")


def _check_path(path: Path) -> None:
    """Raise ``OSError`` for the invalid paths that Python rejects before it calls the system."""
    try:
        held = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"its path has a character that no file name has ({error.reason})") from None
    if b"\0" in held:
        raise OSError(errno.EINVAL, "its path has a NUL character, which no file name has")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before work that may take minutes.

    Raises:
        IsADirectoryError: the path is a folder.
        FileNotFoundError: its folder does not exist.
        OSError: the path is invalid.
    """
    _check_path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path to write to. It replaces ``path`` at the end, unless an error was raised.

    A symbolic link is kept and its target replaced. Anything but a plain file, such as ``/dev/null``, is written to
    directly.
    """
    _check_path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 with the same line ends on every system.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


# Parse JSON text; every kind of bad text raises the same exception.

_DEEPEST = 100  # levels; recursive Python code handles a few hundred
_INTEGER = re.compile(r'"(?:[^"\\]|\\.)*"|(?<![\d.])(\d+)(?![\d.eE])')  # group 1 is an integer outside of strings


def parsed_json(text: str) -> Any:
    """Parse ``text``.

    Raises:
        json.JSONDecodeError: the text is not JSON, nests more than 100 levels deep, or has an integer with more digits
            than Python reads.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep(text) from None
    except ValueError:  # Python reads integers of 4,300 digits at most
        found = max((match for match in _INTEGER.finditer(text) if match[1]), key=lambda match: len(match[1]))
        what = f"an integer has {len(found[1])} digits, too many to read"
        raise json.JSONDecodeError(what, text, found.start(1)) from None
    level = [data]
    for _ in range(_DEEPEST):
        level = [child for held in level for child in _children(held)]
        if not level:
            return data
    raise _too_deep(text)


def _children(held: Any) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else held if isinstance(held, list) else []


def _too_deep(text: str) -> json.JSONDecodeError:
    return json.JSONDecodeError("it is nested too deeply", text, 0)
