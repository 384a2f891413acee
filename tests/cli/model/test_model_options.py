"""What options say of a model: its mode, its weights, its device, and inputs that are not given."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

from autocastfx.cli.model import converted, device_of, given_model
from autocastfx.errors import NotCapturedError


def options(**given: object) -> Namespace:
    usual = {
        "model": "torch.nn:Identity",
        "mode": None,
        "weights": None,
        "trust": False,
        "inputs": [],
        "dtype": "float16",
    }
    return Namespace(**{**usual, **given})


@pytest.mark.parametrize(("mode", "training"), [(None, True), ("train", True), ("eval", False)])
def test_the_mode_is_the_factorys_unless_one_is_given(mode: str | None, training: bool) -> None:
    assert given_model(options(mode=mode), "torch.nn:Identity").training is training


def test_weights_and_mode_apply_to_a_file_too(tmp_path: Path) -> None:
    model, path, weights = nn.Linear(3, 2), tmp_path / "model.pt", tmp_path / "weights.pt"
    torch.save(model, path)
    torch.save(nn.Linear(3, 2).state_dict(), weights)
    found = given_model(options(weights=weights, trust=True, mode="eval"), str(path))
    assert not found.training
    assert torch.equal(found.state_dict()["weight"], torch.load(weights)["weight"])


def test_a_model_given_is_converted_as_it_is() -> None:
    model = nn.Linear(3, 2)
    amp_model = converted(options(inputs=["float32[4,3]"], dtype="bfloat16"), "default", model)
    assert amp_model.plan.low == "bfloat16"
    assert amp_model.weight is model.weight


def test_what_cannot_be_traced_asks_for_inputs() -> None:
    class Sign(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(NotCapturedError, match=r"Here that is --inputs\."):
        converted(options(), "default", Sign())


def test_the_device_is_that_of_parameters_or_buffers() -> None:
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm1d(1, affine=False, device="meta")) == torch.device("meta")
    assert device_of(nn.Identity()) == torch.device("cpu")
