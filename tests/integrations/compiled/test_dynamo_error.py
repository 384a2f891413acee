"""What fails in a call of an enabled model is told in three lines, and nothing of Dynamo's is printed besides."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import BannedOpError, CaptureError, UncapturedGraphWarning
from autocastfx.integrations.compiled import plain_error
from tests.helpers import heard, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("memory", [False, True])
def test_a_wrong_size_names_the_line_and_the_inputs(memory: bool) -> None:
    model = autocastfx.enable(Net(), dtype="bfloat16")
    given = {"memory": object()} if memory else {}
    with heard("torch._subclasses.fake_tensor", logging.WARNING) as logged, pytest.raises(CaptureError) as told:
        model(torch.randn(3, 5), **given)
    first, place, advice = str(told.value).splitlines()
    assert first.startswith("Net fails: ")
    assert "[3, 5] X [4, 8]" in first
    assert place.startswith(f"At {__file__}:")
    called = "float32[3, 5], among others" if memory else "x=float32[3, 5]"
    assert place.endswith(f": return self.layer(x), in module 'layer' (Linear), called with {called}")
    assert advice.startswith("Call the model itself with these inputs, after autocastfx.disable(model)")
    assert told.value.__suppress_context__
    assert logged == []
    autocastfx.disable(model)
    with pytest.raises(RuntimeError, match="3x5 and 4x8"):
        model(torch.randn(3, 5), **given)


def test_an_error_of_the_conversion_is_raised_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("ban:\n  - {reason: not here, ops: [linear]}\n", encoding="utf-8")
    model = autocastfx.enable(Net(), dtype="bfloat16", op_list=["default", path])
    with pytest.raises(BannedOpError, match=r"node 'linear' in module 'layer' is linear, which .*mine\.yaml:2:30 bans"):
        model(torch.randn(3, 4))


def test_other_errors_stay() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory"):
        autocastfx.enable(Fails(), dtype="bfloat16")(torch.randn(3))
    assert plain_error(RuntimeError("out of memory"), Net(), (), {}) is None


def test_a_graph_is_told_to_the_logger() -> None:
    with heard() as lines:
        autocastfx.enable(Net(), dtype="bfloat16")(torch.randn(3, 4))
    assert [line.partition(":")[0] for line in lines] == ["converting a graph of 5 nodes"]


class NoLength(list[int]):
    """Dynamo makes a guard on the length of a list that it reads, and this has none."""

    def __len__(self) -> int:
        raise NotImplementedError


class ReadsIt(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.sizes, self.breaks, self.calls = NoLength((2, 3)), breaks, 0
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
            self.calls += 1
        return self.last(x) * self.sizes[0]


@pytest.mark.parametrize("breaks", [False, True])
def test_code_that_dynamo_fails_at_is_skipped_and_told(breaks: bool) -> None:
    model, x = ReadsIt(breaks), torch.randn(3, 4)
    expected, calls = model(x), model.calls
    autocastfx.enable(model, dtype="bfloat16")
    with heard("torch._guards", logging.WARNING) as logged, pytest.warns(UncapturedGraphWarning) as told:
        first = model(x)
    (said,) = {str(one.message) for one in told}
    assert said.startswith(f"torch.compile cannot capture forward at {__file__}:")
    assert said.endswith(
        " (NotImplementedError). It has run in float32; from now on (the model) runs under torch.autocast, in bfloat16."
    )
    assert logged == []
    assert model.calls == 2 * calls, "nothing has run twice"
    assert relative_error(first, expected) < 0.02
    assert 0 < relative_error(model(x), expected) < 0.02


def test_code_that_dynamo_fails_at_is_an_error_where_asked_for() -> None:
    model = autocastfx.enable(ReadsIt(), dtype="bfloat16", uncaptured="error")
    with pytest.raises(CaptureError, match=r"^torch.compile cannot capture forward at .* \(NotImplementedError\)\.$"):
        model(torch.randn(3, 4))
