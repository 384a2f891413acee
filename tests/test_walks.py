"""How many files somebody opens who follows a rule to its cast: those whose functions return it on the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

import autocastfx
from autocastfx.plan.plan import Decision, Placement
from autocastfx.policy.rule import Rule

PACKAGE = Path(autocastfx.__file__).parent
MOST = 9


def test_from_a_rule_to_its_cast_at_most_nine_files_are_read() -> None:
    """Of one linear layer: its rule is read, matched, decided, placed, and its input cast."""
    files = dict[str, set[str]]()

    def trace(frame: FrameType, event: str, result: Any) -> None:
        path = Path(frame.f_code.co_filename)
        is_named = not frame.f_code.co_name.startswith("<")  # not what another function maps
        if event == "return" and is_named and path.is_relative_to(PACKAGE):
            for step in steps(result):
                files.setdefault(str(path.relative_to(PACKAGE)), set()).add(step)

    sys.setprofile(trace)
    try:
        autocastfx.convert(nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16), dtype="bfloat16", check=False)
    finally:
        sys.setprofile(None)
    assert {"Rule", "Decision", "Placement", "cast"} == set[str]().union(*files.values())
    assert len(files) <= MOST, files


def steps(result: Any) -> Iterator[str]:
    """Name what of the way a result is, or gives for nodes."""
    found = [*result.values()] if isinstance(result, Mapping) else [result]
    for value in found:
        if isinstance(value, (Rule, Decision, Placement)):
            yield type(value).__name__
        elif isinstance(value, fx.Node) and value.target is torch.ops.aten.to.dtype:
            yield "cast"
