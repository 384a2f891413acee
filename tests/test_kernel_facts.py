"""The table of kernel facts loads, and what it says of a few ops is so."""

from __future__ import annotations

import pytest
import torch

import autocastfx
from autocastfx.kernel_facts import load_kernel_facts
from tests.helpers import Function


def test_in_place_ops_have_the_facts_of_their_base() -> None:
    facts = load_kernel_facts()
    assert not facts.runs("rrelu", "float16", "cpu")
    assert not facts.runs("rrelu_", "float16", "cpu")
    assert facts.runs("rrelu", "bfloat16", "cpu")
    assert facts.runs("rrelu", "float16", "cuda")


def test_what_the_table_calls_missing_fails_on_this_device_and_is_placed_float32() -> None:
    x = torch.rand(1, 1, 4, 4, 4)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        torch.nn.functional.avg_pool3d(x.bfloat16(), 2)

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool3d(x @ x, 2) @ torch.ones(2, 2)

    amp_model = autocastfx.convert(Function(pooled), (x,), dtype=torch.bfloat16)
    assert amp_model.plan["avg_pool3d"].decision.source == "forced:no-kernel"
    assert amp_model(x).dtype == torch.float32
