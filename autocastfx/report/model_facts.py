"""Facts about a converted model and its page, for the header of the page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version

import torch
from torch import nn

from autocastfx.report.compiled_graph import fold_of
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["ModelFacts", "model_facts"]

_DATE = "SOURCE_DATE_EPOCH"  # https://reproducible-builds.org/specs/source-date-epoch


@dataclass(frozen=True)
class ModelFacts:
    """A model as a whole.

    Attributes:
        name: the class of the original; empty for a converted model that was unpickled, which does not know it.
        parameters: the number of elements of all parameters, tied ones counted once.
        fold: the level of folding.
        date: of now, or of SOURCE_DATE_EPOCH.
        autocastfx, torch: versions.
    """

    name: str
    parameters: int
    fold: str
    date: str
    autocastfx: str
    torch: str


def model_facts(model: nn.Module) -> ModelFacts:
    """Collect the facts of a converted or enabled model.

    Raises:
        ValueError: the environment variable SOURCE_DATE_EPOCH is not a number of seconds.
    """
    original = model._maker.model if isinstance(model, AmpModule) else model
    return ModelFacts(
        name=type(original).__name__ if original is not None else "",
        parameters=sum(p.numel() for p in model.parameters()),
        fold=model._maker.fold if isinstance(model, AmpModule) else fold_of(model),
        date=_date(os.environ.get(_DATE)),
        autocastfx=version("autocastfx"),
        torch=str(torch.__version__),
    )


def _date(seconds: str | None) -> str:
    try:
        moment = datetime.now(timezone.utc) if not seconds else datetime.fromtimestamp(int(seconds), timezone.utc)
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(
            f"{_DATE} is {seconds!r}, which is not a number of seconds since 1970: set it to one, or unset it"
        ) from error
    return f"{moment:%Y-%m-%d %H:%M} UTC"
