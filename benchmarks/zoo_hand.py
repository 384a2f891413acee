"""Hand-written hard cases: small models that hold what trips up a conversion."""

from __future__ import annotations

from benchmarks.zoo_case import ZooModel

__all__ = ["HAND"]

HAND: tuple[ZooModel, ...] = ()
