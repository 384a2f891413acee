"""Tell why a model is captured again, and that it is often."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Protocol

from autocastfx.capture.call import CallStructure
from autocastfx.errors import ManyVariantsWarning

_LOG = logging.getLogger("autocastfx")
MANY = 8  # graphs for one call structure, which are captured without a warning


class Captured(Protocol):
    """What a graph was captured from."""

    @property
    def structure(self) -> CallStructure:
        """Of the call."""
        ...

    @property
    def training(self) -> tuple[bool, ...]:
        """The modes of the modules."""
        ...


def tell_of_recapture(graphs: Sequence[Captured]) -> None:
    """Say why the last of the graphs was captured though there are others; warn, once, where they are many.

    Call this while Dynamo captures the last one.
    """
    if len(graphs) == 1:
        return
    last, why = graphs[-1], _reason()
    _LOG.info("capturing variant %d: %s", len(graphs), why)
    if sum(one.structure == last.structure and one.training == last.training for one in graphs) == MANY + 1:
        warnings.warn(
            f"more than {MANY} variants were captured for the call ({last.structure}), each in seconds. The last one, "
            f"because {why}. Give the model fewer sizes or values, as by padding to a few lengths, or write that code "
            "so that one graph serves all; the logger autocastfx tells the reason of each capture.",
            ManyVariantsWarning,
            stacklevel=2,
        )


def _reason() -> str:
    """Return the guard that the latest graph fails, and the line that made it, as Dynamo tells."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("recompile_reason"), str):
        frame = frame.f_back
    if frame is None:
        return "no graph fits"
    guard, _, line = str(frame.f_locals["recompile_reason"]).partition("\n")[0].partition("  # ")
    guard, line = re.sub(r"^[\d/]+: ", "", guard).strip(), re.sub(r"\s*\(HINT.*", "", line).strip()
    return f"it does not hold that {guard}{f' ({line})' if line else ''}"
