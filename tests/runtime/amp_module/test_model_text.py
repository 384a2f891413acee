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
    said = "AmpModule of Net: bfloat16 on cpu, op list bfloat16\n  {} mode, 1 of {} variants: 1 low, 1 float32; 3 casts"
    assert repr(amp_model) == said.format("train", 1)
    amp_model.eval()(torch.randn(2, 8))
    assert repr(amp_model) == said.format("train", 1)  # no module asks for its mode: it is the same graph
    for twin in (copy.deepcopy(amp_model), pickle.loads(pickle.dumps(amp_model))):
        assert repr(twin) == "AmpModule of Net, captured at its first call"
        twin(torch.randn(2, 8))
        assert repr(twin) == said.format("eval", 1)
    assert str(amp_model).startswith(f"{amp_model!r}\n")
    assert "(0): AmpModule of Net: bfloat16 on cpu" in repr(nn.Sequential(amp_model))


def test_before_a_call_it_names_the_class_alone() -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    assert repr(amp_model) == "AmpModule of Net, captured at its first call"
    amp_model(torch.randn(2, 8))
    assert "1 of 1 variants" in repr(amp_model)
