"""The benchmarks of placement run, at tiny sizes, and count what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import conversion, placement
from benchmarks.graphs import SHAPES
from benchmarks.models import FullModel, ResNet50


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_have_the_size_asked_for_and_something_to_place(shape: str) -> None:
    SHAPES[shape](50).lint()
    assert 60 <= len(SHAPES[shape](60).nodes) < 90
    row = conversion.measure(shape, 60)
    assert 0 < row.low < row.nodes


def test_conversion_writes_its_rows_and_fails_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    assert conversion.main(["--sizes", "40,60", "--shapes", "unet", "--json", str(path)]) == 0
    assert [row["shape"] for row in json.loads(path.read_text())["rows"]] == ["unet", "unet"]
    monkeypatch.setattr(conversion, "SIZES", (60,))
    monkeypatch.setattr(conversion, "LIMIT", 0.0)
    assert conversion.main(["--sizes", "60", "--shapes", "unet"]) == 1


def test_resnet50_has_its_known_number_of_parameters() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet50().parameters()) == 25_557_032


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> FullModel:
    inputs = {"pixel_values": torch.empty(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    model = FullModel(lambda: ResNet50((1, 1), 8, 10), lambda: {k: v.to("meta") for k, v in inputs.items()})
    monkeypatch.setattr(placement, "MODELS", {"tiny": model})
    return model


def test_casts_of_parameters_and_of_the_rest_are_counted_apart(tiny: FullModel) -> None:
    row = placement.measure("tiny", tiny, "default, fold=exact")
    modules = [m for m in ResNet50((1, 1), 8, 10).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    weights = [parameter for module in modules for parameter in module.parameters()]
    assert row.parameter_casts == len(weights)
    assert row.parameter_bytes == 6 * sum(weight.numel() for weight in weights)
    image, logits = 2 * 3 * 32 * 32, 2 * 10
    assert (row.activation_casts, row.activation_bytes) == (2, 6 * (image + logits))


def test_what_is_made_of_parameters_alone_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.softmax(-1).mT

    model = FullModel(Scaled, lambda: {"x": torch.ones(3, 4)})
    row = placement.measure("scaled", model, "default, fold=exact")
    assert (row.parameter_casts, row.parameter_bytes, row.activation_bytes) == (1, 6 * 16, 6 * 3 * 4)


def test_ratios_are_to_the_first_policy_and_what_is_missing_says_so(
    tiny: FullModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = {"one": {}, "two": {"op_list": ["default"]}, "three": {"op_list": "no_such_preset"}}
    monkeypatch.setattr(placement, "POLICIES", policies)
    monkeypatch.setattr(placement, "AUTOCAST", "one")
    path = tmp_path / "rows.json"
    assert placement.main(["--models", "tiny", "--json", str(path)]) == 0
    assert [row["ratio"] for row in json.loads(path.read_text())["rows"]] == [1.0, 1.0, None]
    assert "not there yet: no preset is named 'no_such_preset'" in capsys.readouterr().out
