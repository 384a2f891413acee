"""What nobody refers to any more is freed: models, what was converted of them, and their weights."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from tests.helpers import Net


def net() -> nn.Module:
    return Net(lambda m, x: m.first(x) * x.shape[0], first=nn.Linear(4, 4))


@pytest.mark.parametrize("options", [{}, {"check": True}, {"weights": "cached"}, {"weights": "low"}], ids=str)
def test_a_converted_model_is_freed_with_its_model(options: dict[str, Any]) -> None:
    model = net()
    amp_model = autocastfx.convert(model, (torch.randn(2, 4),), dtype="bfloat16", **options)
    with torch.no_grad():
        amp_model(torch.randn(2, 4)), amp_model(torch.randn(3, 4))
    left = [weakref.ref(one) for one in (model, model.first.weight, amp_model)]
    del model, amp_model
    gc.collect()
    assert [one() for one in left] == [None] * 3


def test_an_enabled_model_is_freed() -> None:
    model = net()
    autocastfx.enable(model, dtype="bfloat16")
    model(torch.randn(2, 4)), model(torch.randn(3, 4))
    left = [weakref.ref(one) for one in (model, model.first.weight)]
    del model
    gc.collect()
    assert [one() for one in left] == [None] * 2
