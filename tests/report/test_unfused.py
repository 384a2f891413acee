"""Attention that no fused kernel takes is told by the lint and the dump, with what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import autocastfx


class Attends(nn.Module):
    """Attention under a mask, or over keys that heads share."""

    def __init__(self, heads: int = 4, *, masked: bool = True, transposed: bool = False) -> None:
        super().__init__()
        self.heads, self.masked, self.transposed = heads, masked, transposed

    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keys, mask = q[:, : self.heads], mask.mT if self.transposed else mask
        return nn.functional.scaled_dot_product_attention(
            q, keys, keys, attn_mask=mask if self.masked else None, enable_gqa=self.heads < 4
        )


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (Attends(2), "repeat the keys and values"),
        (Attends(transposed=True), "make the mask contiguous"),
        (Attends(2, masked=False), None),
        (Attends(), None),
    ],
)
def test_attention_that_no_fused_kernel_takes_is_told(model: nn.Module, remedy: str | None) -> None:
    inputs = torch.randn(1, 4, 8, 8), torch.zeros(8, 8)
    # "dense_mask" would lay the mask out
    amp_model = autocastfx.convert(model, inputs, dtype="bfloat16", device="cuda", check=False, recompose=False)
    found, text = autocastfx.lint(amp_model), autocastfx.dump(amp_model)
    assert len(found.unfused) == (remedy is not None)
    for shown in (str(found), text):
        told = re.findall(r"no fused attention takes scaled_dot_product_attention: .*", shown)
        assert len(told) == len(found.unfused)
        assert all(str(remedy) in one for one in told)
    fixed = autocastfx.convert(model, inputs, dtype="bfloat16", device="cuda", check=False)
    assert bool(autocastfx.lint(fixed).unfused) == (model.heads < 4 and model.masked)
