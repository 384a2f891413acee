"""The cost and the error of a plan, and the limit that a user sets for one of the two."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget", "Limit", "Point"]


@dataclass(frozen=True)
class Point:
    """A plan's cost and error.

    Attributes:
        name: where it comes from: ``"start"``, the list to start from; ``"cut"``; or ``"tuned"``, measured as a list.
        bytes: moved by ops and casts in a call.
        predicted: relative error of the target.
        measured: the same, on batches held out; None if it was not measured.
    """

    name: str
    bytes: int
    predicted: float
    measured: float | None = None

    @property
    def error(self) -> float:
        """The measured error, or else the predicted one."""
        return self.predicted if self.measured is None else self.measured

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"measured {self.measured:.2e}"
        return f"{self.bytes / 1e6:.2f} MB, predicted error {self.predicted:.2e}, {measured}"


@dataclass(frozen=True)
class Budget:
    """A limit as a user sets it; one of the two.

    Attributes:
        error: the largest relative error of the target; of the plans within it, the one of fewest bytes is best.
        bytes: the largest share of the bytes that the list to start from moves; of the plans within it, the one of the
            least error is best.

    Raises:
        ValueError: both are given, or none; or it is not above 0.
    """

    error: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.error, self.bytes) if value is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(f"a budget is an error or a share of bytes, above 0, not {self}")


@dataclass(frozen=True)
class Limit:
    """A limit of one search.

    Attributes:
        error: the largest relative error of the target; None if bytes are limited.
        bytes: the most bytes moved; None if the error is limited.
    """

    error: float | None = None
    bytes: float | None = None

    def __str__(self) -> str:
        return f"an error of {self.error:.2e}" if self.error is not None else f"{(self.bytes or 0) / 1e6:.2f} MB"

    def keeps(self, point: Point) -> bool:
        """True if a plan is within the limit; by its predicted error if it was not measured."""
        if self.error is not None:
            return point.error <= self.error
        return point.bytes <= (self.bytes or 0)

    def rank(self, point: Point) -> tuple[float, float]:
        """Return the order among plans within the limit; the least is best."""
        return (point.bytes, point.error) if self.error is not None else (point.error, point.bytes)
