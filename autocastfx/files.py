"""Text files: read with one kind of error, and never half written."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_writable", "read_whole", "replacing", "write_whole"]


def read_whole(path: Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        OSError: it cannot be read, or no file can have this path.
        UnicodeDecodeError: it is no such text.
    """
    _check_path(path)
    return path.read_text(encoding="utf-8")


def _check_path(path: Path) -> None:
    """Refuse, as the system refuses other paths, those that Python does not even hand to it."""
    try:
        held = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"its path has a character that no file name has ({error.reason})") from error
    if b"\0" in held:
        raise OSError(errno.EINVAL, "its path has a NUL character, which no file name has")


def check_writable(path: Path) -> None:
    """Refuse what cannot become a file, before work that may take minutes.

    Raises:
        IsADirectoryError: it is a folder.
        FileNotFoundError: its folder does not exist.
        OSError: no file can have this path.
    """
    _check_path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """While open, a path to write to, which takes the place of ``path`` in the end, unless an error ends it.

    A link stays a link, to the new file; what is no plain file, such as ``/dev/null``, is written to as it is.
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
    """Write ``text`` as UTF-8, with the same line ends on every system.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
