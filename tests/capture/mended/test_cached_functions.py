"""A function with a cache in forward: the graph computes it anew, which is told of the user's own functions."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import StateWarning


@lru_cache
def positions(size: int) -> Tensor:
    return torch.arange(float(size))


class Located(nn.Module):
    """Adds a table that is made once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.base = nn.Linear(16, 16), how, 1.0

    @lru_cache  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.arange(float(size)) * self.base

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (positions(16) if self.how == "function" else self.table(16))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize(("how", "named"), [("function", "positions at "), ("method", r"Located\.table at ")])
def test_it_is_told_once_with_its_place(how: str, named: str, way: str) -> None:
    x = torch.randn(4, 16)
    said = rf"forward calls {named}.*test_cached_functions\.py:\d+, whose functools\.lru_cache a graph leaves out"
    amp_model = getattr(autocastfx, way)(Located(how), dtype="bfloat16")
    with pytest.warns(StateWarning, match=said) as told:
        amp_model(x)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_model(torch.randn(3, 16))  # captured again
        autocastfx.convert(nn.Linear(16, 16), x, dtype="bfloat16")  # which calls none


def test_caches_of_libraries_are_not_told() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if torch.distributed.is_available() else x

    autocastfx.convert(Asks(), torch.randn(4, 16), dtype="bfloat16")
