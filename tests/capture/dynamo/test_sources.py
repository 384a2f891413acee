"""Conversions leave nothing behind: sources that tracebacks show go with the code."""

from __future__ import annotations

import gc
import linecache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import graph_module

import autocastfx


def kept() -> tuple[set[str], set[str]]:
    """Names of the generated sources that Python and torch keep."""
    gc.collect()
    sources: Any = graph_module
    return {name for name in linecache.cache if name.startswith("<")}, set(sources._loader.eval_cache)


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "first call"])
def test_conversions_in_a_loop_do_not_grow(given: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(3, 8)

    def counts() -> tuple[int, ...]:
        autocastfx.convert(model, (x,) if given else None, dtype=torch.bfloat16)(x)
        return tuple(map(len, kept()))

    first = counts()
    assert [counts() for _ in range(3)] == [first] * 3


def test_the_source_of_a_graph_is_there_for_as_long_as_the_graph() -> None:
    before = kept()[0]
    amp_model = autocastfx.convert(nn.Linear(8, 8), (torch.randn(3, 8),), dtype=torch.bfloat16)
    names = kept()[0] - before
    sources = ["".join(linecache.getlines(name)) for name in names]
    assert any("linear" in source for source in sources)
    del amp_model
    assert not names & kept()[0]
