"""A converted model tells why it captures again, and warns where it does so without end."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import ManyVariantsWarning
from autocastfx.runtime.variant_table import MANY
from tests.helpers import heard


class Unrolled(nn.Module):
    """A loop over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(8)
        for i in range(x.shape[0]):
            state = torch.tanh(self.cell(state + x[i]))
        return state


def test_each_further_capture_is_logged_and_too_many_are_warned_of_once() -> None:
    torch.manual_seed(0)
    model = Unrolled().eval()
    amp_model = autocastfx.convert(model, torch.randn(1, 8), dtype=torch.bfloat16)
    counts: list[int] = []
    with heard() as lines, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(1, MANY + 3):
            x = torch.randn(length, 8)
            assert (amp_model(x) - model(x)).abs().max() < 0.1
            counts.append(sum(one.category is ManyVariantsWarning for one in told))
    assert counts == [0] * MANY + [1, 1]
    lines = [line for line in lines if "variant" in line]
    assert len(lines) == MANY + 1
    reason = "x.shape[0] is 2, and the graph takes 1 ("
    assert lines[0].startswith(f"capturing variant 3: no variant fits these sizes: {reason}")
    assert lines[0].endswith("for i in range(x.shape[0]):)")
    (warning,) = (one for one in told if one.category is ManyVariantsWarning)
    said = str(warning.message)
    assert said.startswith(f"more than {MANY} variants were captured for the call (x=float32[2d]), each in seconds.")
    assert "for i in range(x.shape[0]):" in said
    assert "padding to a few lengths" in said


def test_other_calls_and_modes_are_counted_apart() -> None:
    model = Unrolled()
    amp_model = autocastfx.convert(model, torch.randn(1, 8), dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(1, 6):
            amp_model.train()(torch.randn(length, 8))
            amp_model.eval()(torch.randn(length, 8))
    assert len(amp_model.variants) == 10
