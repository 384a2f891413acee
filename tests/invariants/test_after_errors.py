"""The caller's module intact after any error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autocastfx
from autocastfx.errors import BannedOpError, CaptureError, OpListError
from tests.invariants.pair import Busy, settings_now, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU"),
    pytest.mark.filterwarnings("ignore::autocastfx.errors.StateWarning"),  # of a model that changes whatever it can
]


def _ban(tmp_path: Path) -> Path:
    path = tmp_path / "ban.yaml"
    path.write_text("ban: [cumprod]\n")
    return path


FAILURES: dict[str, tuple[str, type[Exception], Callable[[Path], dict[str, Any]]]] = {
    "the model raises": ("raise", CaptureError, lambda _: {}),
    "data-dependent branch": ("branch", CaptureError, lambda _: {}),
    "wrong number of inputs": ("", CaptureError, lambda _: {"example_inputs": ()}),
    "wrong size of input": ("", CaptureError, lambda _: {"example_inputs": (torch.randn(3, 5),)}),
    "banned op": ("op", BannedOpError, lambda folder: {"op_list": ["default", _ban(folder)]}),
    "banned op, without inputs": (
        "op",
        BannedOpError,
        lambda folder: {"op_list": ["default", _ban(folder)], "example_inputs": None},
    ),
    "missing list": ("", OpListError, lambda _: {"op_list": "nowhere.yaml"}),
    "unknown choice": ("", ValueError, lambda _: {"fold": "all"}),
    "dtype": ("", ValueError, lambda _: {"dtype": torch.float64}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_callers_module_is_intact_after_an_error(name: str, tmp_path: Path) -> None:
    fail, error, options = FAILURES[name]
    model = Busy(fail)
    arguments = {"example_inputs": (torch.randn(3, 8),), **options(tmp_path)}
    before, now = snapshot(model), settings_now()
    with pytest.raises(error):
        autocastfx.convert(model, **arguments)
    assert snapshot(model) == before
    assert settings_now() == now


def test_a_model_that_failed_converts_once_the_cause_is_gone() -> None:
    x = torch.randn(3, 8)
    model = Busy("raise")
    with pytest.raises(CaptureError, match="on purpose"):
        autocastfx.convert(model, (x,), dtype="float16")
    model.fail = ""
    assert autocastfx.convert(model, (x,), dtype="float16")(x).shape == (3, 8)
