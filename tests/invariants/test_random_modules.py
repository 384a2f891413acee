"""Random modules: none fails to convert, and none is farther from float32 than its roundings allow."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.random_modules import FOLDS, WEIGHTS, fault

pytestmark = [
    pytest.mark.filterwarnings("ignore:float16 .* on a CPU"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # of RMS norms under torch.autocast
]


# The first 18 have each dtype with each `fold` and each `weights`.
@pytest.mark.parametrize("seed", [*range(18), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(18, 36))])
def test_a_random_module(seed: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[seed // 9 % 2]
    assert fault(seed, dtype, FOLDS[seed % 3], WEIGHTS[seed // 3 % 3]) == ""
