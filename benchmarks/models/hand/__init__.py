"""The hand-written hard cases of the zoo, a module for each kind of difficulty: small models, each with one of them."""

from __future__ import annotations

from benchmarks.models.hand import attention, numbers, state, structure
from benchmarks.models.zoo import ZooModel

HAND: tuple[ZooModel, ...] = (*attention.CASES, *state.CASES, *numbers.CASES, *structure.CASES)
