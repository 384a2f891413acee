"""The benchmark of packages, with models made up here: each verdict, and processes that end."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx.numerics.check import Check, CheckedValue
from autocastfx.runtime.behaviour import Difference
from benchmarks.packages import __main__ as command
from benchmarks.packages import judge
from benchmarks.packages.case import Case, Given
from benchmarks.packages.row import Row
from benchmarks.packages.table import table

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def _dynamo_as_before() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Two layers; what is computed between them is given."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.between, self.checkpoints = between, checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return self.last(self.between(checkpoint(self.first, x, use_reentrant=False)))
        return self.last(self.between(self.first(x)))


def _inputs() -> Given:
    return (torch.randn(6, 8),), {}


def _case(between: Callable[[Tensor], Tensor] = torch.relu, **more: Any) -> Case:
    return Case("net", lambda: Net(between), _inputs, **more)


def _row(case: Case, way: str, dtype: torch.dtype = LOW) -> Row:
    return judge.judge("package", "1.0", case, dtype, way)


def _branches(x: Tensor) -> Tensor:
    for _ in range(2):
        if x.sum().item() < 1e9:
            x = x + 1
    return x


def _train(model: nn.Module, low: torch.dtype | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("way", "dtype"), [*((way, LOW) for way in judge.WAYS), ("train", torch.float16)])
def test_a_model_that_is_right(way: str, dtype: torch.dtype) -> None:
    case = _case(checkpointed=lambda: Net(checkpoints=True), train=_train)
    assert judge.ways_of(case) == judge.WAYS
    row = _row(case, way, dtype)
    assert (row.verdict, row.dtype) == ("ok", str(dtype)[6:]), row.reason
    assert 0 < row.ours < 2 * row.autocast + 2 * torch.finfo(dtype).eps


def test_what_is_told_is_told() -> None:
    assert judge.ways_of(_case()) == ("convert", "enable", "check")
    row = _row(_case(_branches), "enable")
    assert row.verdict == "warned"
    assert row.reason.startswith("torch.compile cannot capture _branches at tests/test_packages.py:")
    row = _row(_case(_branches), "convert")
    assert row.verdict == "refused"
    assert row.reason.startswith("CaptureError: Net cannot be captured")


def test_errors_of_others_are_foreign_and_of_the_model_are_not_ours() -> None:
    def fails_in_autocast(output: Tensor, _: Given) -> Tensor:
        calls.append(0)
        if len(calls) > judge.STEPS:
            raise KeyError("no")
        return output.sum()

    calls = list[int]()
    row = _row(_case(loss=fails_in_autocast), "enable")
    assert row.verdict == "foreign"
    assert row.reason.startswith("KeyError: 'no' at ")
    row = _row(_case(lambda x: x.no_such_attribute), "enable")  # type: ignore[attr-defined]
    assert row.verdict == "not run"
    assert "no_such_attribute" in row.reason
    assert _row(_case(lambda x: x * float("inf")), "convert").reason == "float32: its numbers are not finite"


def _changing(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Change a gradient of converted models, or drop it."""
    by_hand = judge._by_hand

    def changed(case: Case, model: nn.Module, low: torch.dtype | None, called: Any = None, **more: Any) -> judge._Ran:
        found = by_hand(case, model, low, called, **more)
        if called is not None:
            gradient = found.gradients.pop(name)
            if change is not None:
                found.gradients[name] = change(gradient)
        return found

    monkeypatch.setattr(judge, "_by_hand", changed)


@pytest.mark.parametrize("change", [torch.zeros_like, lambda g: g * float("nan")])
def test_wrong_numbers_are_silent(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    _changing(monkeypatch, "0.last.bias", change)
    row = _row(_case(), "convert")
    assert row.verdict == "silent"
    assert row.ours > row.autocast


def test_a_gradient_that_all_as_one_would_hide_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_vector", lambda ran, names: torch.ones(1))
    _changing(monkeypatch, "0.first.bias", lambda g: g * 3)
    row = _row(_case(), "convert")
    assert row.verdict == "silent"
    assert row.reason.startswith("gradient first.bias: distance ")


def test_a_gradient_of_one_number_is_judged_by_all_draws() -> None:
    exact, near, far = ({"0.w": torch.tensor([value])} for value in (1e-3, 1.001e-3, 2e-3))
    ran = [judge._Ran(torch.ones(1), gradients) for gradients in (exact, near, far)]
    unlucky = judge._Sides(ran[2], ran[1], ran[0])
    assert judge._each([unlucky], torch.bfloat16).reason.startswith("gradient w: distance ")
    ones, off = (
        judge._Ran(torch.ones(1), {"0.w": torch.ones(1)}),
        judge._Ran(torch.ones(1), {"0.w": torch.ones(1) * 1.01}),
    )
    assert judge._each([unlucky, *[judge._Sides(off, off, ones)] * 4], torch.bfloat16).reason == ""
    assert judge._each([unlucky] * 5, torch.bfloat16).reason


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_what_torchs_own_kernel_gets_wrong_is_foreign(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = judge._by_hand

    def broken(case: Case, model: nn.Module, low: torch.dtype | None, called: Any = None, **more: Any) -> judge._Ran:
        found = by_hand(case, model, low, called, **more)
        if "within" in more:
            found.gradients["0.last.bias"] = found.gradients["0.last.bias"] * float("inf")
        return found

    monkeypatch.setattr(judge, "_by_hand", broken)
    assert _row(_case(), "convert", dtype).verdict == "ok"
    _changing(monkeypatch, "0.last.bias", lambda g: g * 3)
    row = _row(_case(), "convert", dtype)
    assert row.verdict == ("foreign" if dtype is LOW else "silent")
    assert row.reason.startswith("torch's own kernel fails in bfloat16: torch.autocast gives Inf or NaN") == (
        dtype is LOW
    )
    assert row.reason.endswith("; torch.autocast gives Inf or NaN")


def test_a_check_tells_of_torchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = CheckedValue("all gradients", math.inf, math.inf)
    for value, differences, verdict in (
        (wrong, (), "foreign"),
        (replace(wrong, autocast=0.1), (), "silent"),
        (wrong, (Difference("output", "differs", "a call"),), "silent"),
    ):
        found = Check("Net", "bfloat16", differences, ("a call",), (), (value,))
        monkeypatch.setattr(autocastfx, "check", lambda *_, _found=found, **__: _found)
        assert _row(_case(), "check").verdict == verdict


def test_a_missing_gradient_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    _changing(monkeypatch, "1.last.bias", None)
    assert _row(_case(), "convert").reason == "only one side has a gradient of 1.last.bias"


def test_float32_that_nobody_told_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCASTFX_DISABLE", "1")
    with warnings.catch_warnings():
        row = _row(_case(), "enable")
    assert (row.verdict, row.reason) == ("silent", "nothing ran in 16 bits, and nobody said so")


def test_the_command_goes_on_where_a_process_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = tmp_path / "rows.json"
    given = ["models", "--dtypes", "bfloat16", "--ways", "convert", "--json", str(stored)]
    assert command.main(given, "tests.made_up_packages") == 1
    rows = [Row(**row) for row in json.loads(stored.read_text(encoding="utf-8"))["rows"]]
    assert [(row.case, row.verdict, row.reason) for row in rows] == [
        ("ends", "foreign", "the process ended"),
        ("right", "ok", ""),
    ]
    assert capsys.readouterr().out == table(rows) + "\n"
    assert "models, ends, convert: foreign: the process ended (bfloat16)" in table(rows)
    before = stored.read_text(encoding="utf-8")
    assert command.main(given, "tests.made_up_packages") == 1, "it is known from before"
    assert stored.read_text(encoding="utf-8") == before


def test_each_package_of_the_requirements_has_cases() -> None:
    folder = Path(command.__file__).parent
    text = (folder / "requirements.txt").read_text(encoding="utf-8")
    listed = {line.partition("==")[0].replace("-", "_").lower() for line in text.splitlines() if "==" in line}
    assert {{"open_clip": "open_clip_torch"}.get(name, name) for name in command.names()} <= listed
