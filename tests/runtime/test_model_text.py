from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import autocastfx

LOW = torch.bfloat16


class Net(nn.Module):
    """A product in 16 bits and a softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.fc(x), -1)


def test_a_converted_model_says_what_it_is_in_two_lines() -> None:
    amp_model = autocastfx.convert(Net(), torch.randn(2, 8), dtype=LOW)
    said = "AmpModule of Net: bfloat16 on cpu, op list bfloat16\n  {} mode, 1 of 2 variants: 1 low, 1 float32; 3 casts"
    assert repr(amp_model) == said.format("train")
    assert repr(amp_model.eval()) == said.format("eval")
    assert repr(copy.deepcopy(amp_model)) == repr(amp_model)
    assert repr(pickle.loads(pickle.dumps(amp_model))) == repr(amp_model)
    assert str(amp_model).startswith(f"{amp_model!r}\n")
    assert "(0): AmpModule of Net: bfloat16 on cpu" in repr(nn.Sequential(amp_model))


def test_without_a_call_it_says_so() -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    assert repr(amp_model).splitlines()[1].startswith("  draft until the first call, 1 of 2 variants: ")
    amp_model(torch.randn(2, 8))
    assert "draft" not in repr(amp_model)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if len(x) > 2 else -x


def test_where_no_draft_can_be_made_it_names_the_class_alone() -> None:
    assert repr(autocastfx.convert(Branching(), dtype=LOW)) == "AmpModule of Branching, captured at its first call"
