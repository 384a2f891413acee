"""The width and the colours of what a command prints."""

from __future__ import annotations

import os
import shutil
from typing import TextIO, TypedDict

from autocastfx.report.text import LEAST_WIDTH

__all__ = ["Output", "for_output"]


class Output(TypedDict):
    """Arguments of ``TextOptions`` that belong to where the text goes."""

    width: int | None
    colour: bool


def for_output(width: int | None, stream: TextIO) -> Output:
    """Return the width and whether to colour.

    Args:
        width: that was asked for; 0 for no limit, None for the terminal's. Where there is none nothing is shortened.
        stream: where the text goes. Colours are for terminals alone, not for those with ``TERM=dumb`` or ``NO_COLOR``.
    """
    is_terminal = stream.isatty()
    if width is None:
        width = max(shutil.get_terminal_size().columns, LEAST_WIDTH) if is_terminal else None
    colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": width or None, "colour": colour}
