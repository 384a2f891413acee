"""Assertions for tests of op lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.testing import assert_casts, assert_precision


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.softmax(self.query(x) @ x.mT, -1) @ x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["attn"](x)
        return self.head(x)


def converted(*lists: str | autocastfx.OpList) -> autocastfx.AmpModule:
    return autocastfx.convert(Model(), (torch.randn(8, 8),), dtype=torch.bfloat16, op_list=["default", *lists])


def test_what_holds_passes() -> None:
    amp_model = converted()
    assert_precision(amp_model, "layers.*.attn.softmax", torch.float32)
    assert_precision(amp_model, "softmax", torch.float32)
    assert_precision(amp_model, "layers.*.attn.linear", torch.bfloat16)
    assert_precision(amp_model, "layers.0.attn.query", torch.bfloat16)


def test_what_does_not_hold_fails_with_the_explanation() -> None:
    rule = autocastfx.OpList.of({"modules": [{"path": "layers.1.attn", "category": "low"}]}, name="mine")
    with pytest.raises(
        AssertionError, match=r"^1 of 2 do not compute in torch\.float32:\nsoftmax_1 \(softmax\)"
    ) as error:
        assert_precision(converted(rule), "layers.*.attn.softmax", torch.float32)
    assert "mine:modules[0]" in str(error.value)


def test_names_that_mean_nothing_are_errors() -> None:
    amp_model = converted()
    with pytest.raises(KeyError, match=r"'layers\.\*\.attn\.sofmax' \(did you mean"):
        assert_precision(amp_model, "layers.*.attn.sofmax", torch.float32)
    with pytest.raises(ValueError, match=r"computes in torch\.float32 and torch\.bfloat16, never in torch\.float16"):
        assert_precision(amp_model, "softmax", torch.float16)


def test_casts_are_counted() -> None:
    amp_model = converted()
    count = len(amp_model.plan.casts)
    assert_casts(amp_model, at_most=count)
    with pytest.raises(AssertionError, match=rf"^{count} casts, at most {count - 1} are allowed: \S+ \(of \S+\), "):
        assert_casts(amp_model, at_most=count - 1)
    to_float32 = sum(cast.dtype == "float32" for cast in amp_model.plan.casts)
    assert to_float32
    assert_casts(amp_model, at_most=to_float32, dtype=torch.float32)
    with pytest.raises(AssertionError, match=f"^{to_float32} casts"):
        assert_casts(amp_model, at_most=0, dtype=torch.float32)
