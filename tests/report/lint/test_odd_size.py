"""Sizes that are no multiple of 8, of ops that run in 16 bits."""

from __future__ import annotations

import torch
from torch import nn

import autocastfx
from autocastfx.graph.walk import walk
from autocastfx.report.lint.odd_size import OddSize, odd_sizes


class Language(nn.Module):
    """An embedding whose table is the last layer's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.hidden = nn.Linear(16, 12)
        self.back = nn.Linear(12, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.hidden(self.table(ids))))


def test_a_vocabulary_is_told_from_other_sizes() -> None:
    amp_model = autocastfx.convert(Language(), torch.zeros(2, 4, dtype=torch.int64), dtype="float16")
    captured = amp_model.variants[0].captured
    assert captured is not None
    located = tuple(walk(captured.graph, captured.attributes))
    flops = {"linear": 1, "linear_1": 2, "linear_2": 3}
    hidden, back, head = odd_sizes(located, flops, amp_model._held())
    assert hidden == OddSize("linear", "linear", "hidden", "N", "hidden.weight", 12, 16, 0.25, 1)
    assert (back.node, back.name, back.operand, back.table_of) == ("linear_1", "K", "back.weight", "")
    assert (head.name, head.size, head.padded, head.table_of, head.flops) == ("N", 50, 56, "table", 3)
    assert [odd.node for odd in odd_sizes(located, {"linear_2": 3}, amp_model._held())] == ["linear_2"]
