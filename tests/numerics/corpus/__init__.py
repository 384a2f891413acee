"""Small models in the patterns that mixed precision goes wrong on, each with what an expert would demand of it."""

from __future__ import annotations

from tests.numerics.corpus import (
    accumulators,
    demands,
    derivatives,
    dtypes,
    epsilons,
    gaussian_processes,
    geometry,
    graphs,
    islands,
    kernel_attention,
    linear_algebra,
    losses,
    moments,
    ordinary,
    policies,
    positions,
    products,
    residual_streams,
    samplers,
    scatters,
    solvers,
    squares,
    states,
    stencils,
    structure,
    warps,
    whole_numbers,
)
from tests.numerics.corpus.case import Case

__all__ = ["CASES"]

FAMILIES = (
    positions,
    solvers,
    demands,
    whole_numbers,
    products,
    losses,
    scatters,
    accumulators,
    states,
    warps,
    linear_algebra,
    epsilons,
    squares,
    moments,
    stencils,
    kernel_attention,
    geometry,
    gaussian_processes,
    samplers,
    graphs,
    policies,
    islands,
    derivatives,
    residual_streams,
    structure,
    dtypes,
    ordinary,
)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.CASES)
