"""Attempts at a capture: with every size dynamic, with the first of each input, with none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autocastfx
from autocastfx.capture import export
from tests.helpers import Function


def test_an_attempt_that_took_too_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []
    attempt = export._export

    def noted(*args: Any) -> Any:
        attempts.append(args[2])
        return attempt(*args)

    monkeypatch.setattr(export, "SLOW", 0.0)
    monkeypatch.setattr(export, "_export", noted)
    amp_model = autocastfx.convert(Function(lambda x: (x @ x.mT).relu()), (torch.rand(2, 3, 4),), dtype="float16")
    assert attempts == ["all", "first"]
    assert amp_model(torch.rand(5, 3, 4)).shape == (5, 3, 3)
    assert attempts == ["all", "first"]
    assert amp_model(torch.rand(2, 6, 4)).shape == (2, 6, 6)  # the second size is none that may change
    assert attempts == ["all", "first", "first"]
