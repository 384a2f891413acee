"""Read text files with clear errors, and write them whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_writable", "read_whole", "replacing", "write_whole"]


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
