"""The prices by which a placement is chosen, beside the bytes that it moves: of errors, and of products' time."""

from __future__ import annotations

from dataclasses import dataclass

from autocastfx.plan.sensitivity import Sensitivity

__all__ = ["Prices"]


@dataclass(frozen=True)
class Prices:
    """A measurement, and what its errors cost.

    Attributes:
        sensitivity: the effect of each node.
        per_error: the bytes that a squared relative error of 1 costs; None: the errors are told in plans, and change
            no placement.
        bytes_per_flop: the bytes that a device moves in the time by which a float32 product takes longer, for each of
            its operations.
    """

    sensitivity: Sensitivity
    per_error: float | None = None
    bytes_per_flop: float = 0.0
