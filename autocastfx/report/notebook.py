"""``show``: the page of a converted model inside a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from torch import nn

from autocastfx.plan.plan import Plan
from autocastfx.report.comparison import Comparison
from autocastfx.report.dump import dump

__all__ = ["Page", "show"]

_SANDBOX = "allow-scripts allow-downloads allow-forms"  # the search is a form, and the page forbids to send it


@dataclass(frozen=True)
class Page:
    """The page that ``dump(model, format="html")`` writes. As the value of a notebook's cell it is shown there.

    Attributes:
        text: the page's HTML.
        height: of the frame that a notebook shows it in, in pixels.
    """

    text: str = field(repr=False)
    height: int = 700

    def _repr_html_(self) -> str:
        """The page in a frame that cannot reach the notebook."""
        return (
            f'<iframe title="Converted model" sandbox="{_SANDBOX}" allow="clipboard-write" width="100%" '
            f'height="{self.height}" frameborder="0" srcdoc="{html.escape(self.text)}"></iframe>'
        )


def show(
    model: nn.Module, *, comparison: Comparison | None = None, against: Plan | None = None, height: int = 700
) -> Page:
    """Make the page of a converted or enabled model for a notebook: the value of a cell shows it.

    Args:
        model: as for :func:`dump`.
        comparison: as for :func:`dump`.
        against: as for :func:`dump`.
        height: of the frame, in pixels.

    Raises:
        TypeError, ValueError, VariantError: as :func:`dump`.
    """
    return Page(dump(model, format="html", comparison=comparison, against=against), height)
