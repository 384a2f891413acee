"""A row of :mod:`benchmarks.packages`, and its verdicts."""

from __future__ import annotations

from dataclasses import dataclass

VERDICTS = ("ok", "warned", "refused", "silent", "foreign", "not run")
FAULTS = ("silent", "foreign")


@dataclass(frozen=True)
class Row:
    """A case of a package, converted by one way.

    Attributes:
        verdict: ``"ok"``, ``"warned"``, ``"refused"``, ``"silent"``, ``"foreign"``, or ``"not run"`` where float32
            itself does not run.
        ours: the distance from float32 that is nearest to what is allowed, or farthest beyond.
        autocast: torch.autocast's, of the same values.
        reason: what was said, or what is wrong.
    """

    package: str
    version: str
    case: str
    dtype: str
    way: str
    verdict: str
    ours: float
    autocast: float
    seconds: float
    reason: str = ""
