"""Options of the text format of ``dump``."""

from __future__ import annotations

from dataclasses import dataclass

from autocastfx.report.columns import LEAST_WIDTH

__all__ = ["TextOptions"]


@dataclass(frozen=True)
class TextOptions:
    """Arguments of the text format; the first five are those of :func:`dump`.

    Attributes:
        width: the most characters of a line; None for as many as it takes.
        full: a line for every node, not for ops alone.
        only: show nodes of this precision, category or op alone, or with ``"casts"`` what is cast.
        module: show nodes in these modules alone.
        summary: count nodes by op and by module, and list none.
        colour: colour marks and precisions for a terminal.

    Raises:
        ValueError: the width is too small.
    """

    width: int | None = 120
    full: bool = False
    only: str | None = None
    module: str | None = None
    summary: bool = False
    colour: bool = False

    def __post_init__(self) -> None:
        if self.width is not None and self.width < LEAST_WIDTH:
            raise ValueError(f"width is at least {LEAST_WIDTH} characters, or None for no limit, not {self.width}")
        if self.full and self.summary:
            raise ValueError("full=True lists every node and summary=True none: give one of them")
