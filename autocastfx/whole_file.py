"""Files that are never half written."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_writable", "replacing", "write_whole"]


def check_writable(path: Path) -> None:
    """Refuse what cannot become a file, before work that may take minutes.

    Raises:
        IsADirectoryError: it is a folder.
        FileNotFoundError: its folder does not exist.
    """
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """While open, a path to write to, which takes the place of ``path`` in the end, unless an error ends it.

    A link stays a link, to the new file; what is no plain file, such as ``/dev/null``, is written to as it is.
    """
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
