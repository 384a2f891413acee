"""Small models in the patterns that mixed precision goes wrong on, each with what an expert would demand of it."""

from __future__ import annotations

from tests.numerics.corpus import positions, solvers
from tests.numerics.corpus.case import Case

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (*positions.CASES, *solvers.CASES)
