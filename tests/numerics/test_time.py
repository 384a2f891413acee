"""``time``: what it runs, what it says, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.cli.main import main
from autocastfx.errors import CalibrationError, SensitivityError, UnsupportedError
from autocastfx.report.timing import Timing
from tests.helpers import heard

SIDES = ["float32", "torch.autocast", "converted", "cached and kernel"]
X, Y = torch.randn(4, 16), torch.tensor([0, 1, 2, 3])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16), nn.LayerNorm(16))
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)


def timed(model: nn.Module, batch: Any = X, **options: Any) -> Timing:
    return autocastfx.time(model, [batch], **{"rounds": 2, "dtype": "bfloat16", "progress": False, **options})


@pytest.mark.parametrize("training", [True, False])
def test_each_side_runs_and_the_model_is_as_it_was(training: bool) -> None:
    model = Net().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    found = timed(model)
    assert [one.name for one in found.sides] == SIDES
    assert all(len(one.milliseconds) == 2 and min(one.milliseconds) > 0 for one in found.sides)
    assert found.side("torch.autocast").ratios == (1.0, 1.0, 1.0)
    assert {"addmm", "native_layer_norm"} <= found.side("float32").ops.keys()
    assert ("native_layer_norm_backward" in found.side("converted").ops) is training
    assert list(found.side("converted").ops.values()) == sorted(found.side("converted").ops.values(), reverse=True)
    assert "a training step" in found.what if training else "a forward" in found.what
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.calls, model.training) == (0, training)


def test_a_loss_takes_the_output_and_the_batch() -> None:
    seen: list[Any] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        return nn.functional.cross_entropy(output, batch[1])

    timed(Net(), (X, Y), loss_fn=loss, inputs=lambda batch: batch[0])
    assert seen[0][1] is Y
    with pytest.raises(SensitivityError, match=r"inputs=lambda batch: batch\[0\]"):
        timed(Net(), (X, Y))


def test_compiled_sides_are_timed_when_asked_for() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    with pytest.MonkeyPatch.context() as patch:  # Inductor itself takes half a minute
        patch.setattr(torch, "compile", lambda model: lookup_backend("eager") and model)
        found = timed(Net(), compiled=True)
    assert [one.name for one in found.sides] == [*SIDES, "torch.autocast, compiled", "converted, compiled"]


def test_wrong_arguments_are_one_error() -> None:
    with pytest.raises(UnsupportedError, match="time the original"):
        timed(autocastfx.convert(Net(), X))
    with pytest.raises(CalibrationError, match="no batches to time"):
        autocastfx.time(Net(), [])
    with pytest.raises(ValueError, match="rounds is a whole number from 2 on, not 1"):
        timed(Net(), rounds=1)


def test_a_side_that_fails_is_named() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(4, 4).index_add(0, Y, x @ x.mT)  # torch.autocast gives it a product of 16 bits

    with pytest.raises(UnsupportedError, match=r"the call fails in torch\.autocast: RuntimeError: "):
        timed(Adds())


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with heard():
        line = f"time {__name__}:Net --inputs float32[4,16] --dtype bfloat16 --rounds 2"
        assert main(line.split()) == 0
    said = capsys.readouterr().out
    assert said.startswith("Net in bfloat16 on a cpu: a training step without optimizer, 2 rounds in turns\n")
    with heard():
        assert main([*line.split(), "--page", str(tmp_path / "net.html")]) == 0
    capsys.readouterr()
    assert '"timing":{"what":"Net in bfloat16 on a cpu' in (tmp_path / "net.html").read_text(encoding="utf-8")
    assert main([*line.split(), "--page", str(tmp_path / "gone" / "net.html")]) == 2
    assert "gone" in capsys.readouterr().err
    assert main([*line.split()[:-1], "1"]) == 2
    assert "--rounds is a number from 2 on, not 1." in capsys.readouterr().err
