"""The relative error of a converted model's gradient or output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.errors import SensitivityError
from autocastfx.numerics.compare import TargetDistance
from tests.helpers import Net


def model() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def loss(output: Any, batch: Any) -> torch.Tensor:
    return output.square().mean()


def test_the_same_model_has_no_error_and_is_unchanged() -> None:
    plain = model().train()
    before = copy.deepcopy(plain.state_dict())
    judge = TargetDistance(plain, [X, X + 1], loss, "gradient", None)
    assert judge(plain, torch.bfloat16) == 0.0  # dropout draws the same numbers
    assert all(torch.equal(now, before[name]) for name, now in plain.state_dict().items())
    assert all(p.grad is None for p in plain.parameters())


class Counting(nn.Module):
    """Its forward sets attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(8, 2), 0, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        return torch.relu(self.linear(x))


@pytest.mark.filterwarnings("ignore:forward changes 'calls', 'seen'")
def test_attributes_that_a_forward_sets_are_unchanged() -> None:
    plain = Counting()
    amp_model = autocastfx.convert(plain, X, dtype="bfloat16")
    found = autocastfx.sensitivity(plain, [X], loss, dtype="bfloat16", progress=False)
    assert found.jumps_true > 0  # the model itself ran
    assert TargetDistance(plain, [X], loss, "gradient", None)(amp_model, torch.bfloat16) > 0
    assert (plain.calls, plain.seen) == (0, [])


@pytest.mark.parametrize("of", ["gradient", "output"])
def test_a_factor_is_its_own_error(of: str) -> None:
    plain = model().eval()
    judge = TargetDistance(plain, [X], loss if of == "output" else (lambda out, batch: out.sum()), of, None)

    assert judge(Net(lambda m, x: plain(x) * 1.25), torch.bfloat16) == pytest.approx(0.25, rel=1e-5)


def test_the_error_of_several_batches_is_their_root_mean_square() -> None:
    plain = nn.Linear(8, 2)
    judge = TargetDistance(plain, [X, X[:16], X[:8], X[:4]], None, "output", None)

    # By a quarter in one of four batches
    assert judge(Net(lambda m, x: plain(x) * (1.25 if len(x) == 32 else 1.0)), torch.bfloat16) == pytest.approx(
        0.125, rel=1e-5
    )


def test_an_overflow_is_an_infinite_error() -> None:
    plain = nn.Linear(8, 2)
    judge = TargetDistance(plain, [X], None, "output", None)

    assert judge(Net(lambda m, x: (plain(x) * 1e30).half()), torch.float16) == float("inf")


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(SensitivityError, match="the gradient of batch 0 is zero or not finite in float32"):
        TargetDistance(model(), [X], lambda out, batch: (out * 0).sum(), "gradient", None)


def test_small_gradients_keep_their_digits_in_float16() -> None:
    plain = nn.Linear(8, 2)
    amp_model = autocastfx.convert(plain, X, dtype="float16")
    tiny = TargetDistance(plain, [X], lambda out, batch: out.sum() * 1e-9, "gradient", None)
    assert tiny(amp_model, torch.float16) < 4 * torch.finfo(torch.float16).eps


def test_what_is_frozen_has_no_gradient_to_err_in() -> None:
    plain = nn.Sequential(nn.Linear(16, 16).requires_grad_(requires_grad=False), nn.Linear(16, 2))
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    amp_model = autocastfx.convert(plain, x, dtype="bfloat16", check=False)
    assert 0 < TargetDistance(plain, [x], loss, "gradient", None)(amp_model, torch.bfloat16) < 0.1
