"""Searches of small models in bfloat16, for tests of the search and its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autocastfx
from autocastfx.numerics.plan_search import PlanSearch
from autocastfx.plan.plan import Prices

__all__ = ["search_of"]


def search_of(build: Callable[[], nn.Module], probes: int = 64) -> PlanSearch:
    """Measure what 16 bits do to the gradient of a model of 16 inputs, and return the search among its plans."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, x = build(), torch.randn(64, 16)
    found = autocastfx.sensitivity(model, [x], _loss, dtype="bfloat16", probes=probes, progress=False)
    base = autocastfx.convert(model, x, dtype="bfloat16")
    return PlanSearch(base, base._variant_for((x,), {}), Prices(found), torch.bfloat16)


def _loss(output: Any, batch: Any) -> torch.Tensor:
    return output.square().mean()
