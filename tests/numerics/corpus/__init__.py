"""Small models in the patterns that mixed precision goes wrong on, each with what an expert would demand of it."""

from __future__ import annotations

from tests.numerics.corpus import demands, losses, positions, scatters, solvers, states, whole_numbers
from tests.numerics.corpus.case import Case

__all__ = ["CASES"]

FAMILIES = (positions, solvers, demands, whole_numbers, losses, scatters, states)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.CASES)
