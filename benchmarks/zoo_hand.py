"""Hand-written hard cases: small models, each with one difficulty for a conversion."""

from __future__ import annotations

from benchmarks.hand import attention, numbers, state, structure
from benchmarks.zoo_case import ZooModel

__all__ = ["HAND"]

HAND: tuple[ZooModel, ...] = (*attention.CASES, *state.CASES, *numbers.CASES, *structure.CASES)
