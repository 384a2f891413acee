"""Find the source line that made a node in the stack trace that capture recorded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import torch

__all__ = ["SourceLine", "source_line"]

_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)
_PACKAGES = tuple(f"{path}{os.sep}" for folder in _FOLDERS for path in (folder, folder.resolve()))
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .*\n(?! *File) *(.*)$', re.MULTILINE)


@dataclass(frozen=True)
class SourceLine:
    """A line of a model's code.

    Attributes:
        path: the file's path, as imported.
        number: the line's number.
        code: the line's text.
    """

    path: str
    number: int
    code: str

    @property
    def file(self) -> str:
        """The names of folder and file, without the rest of the path, which differs from machine to machine."""
        parts = PureWindowsPath(self.path).parts[-2:]  # splits at both kinds of slash
        return "/".join(part for part in parts if part != "/" and part != "\\")

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.code}"


def source_line(trace: str) -> SourceLine | None:
    """Return the innermost line outside torch and this package; None if the trace has none."""
    own = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_PACKAGES)]
    if not own:
        return None
    file, number, code = own[-1]
    return SourceLine(file, int(number), code.strip())
