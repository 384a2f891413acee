"""``python -m benchmarks.gpu`` on a CPU with tiny models, and how it runs stages that fail."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import time
import unittest
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import measure, models, rows, sides, table
from benchmarks.gpu.plan import CALLS, plan
from benchmarks.gpu.runner import Settings, run
from benchmarks.gpu.stage import Given, Rounds, Row, Stage
from benchmarks.gpu.stages import samples
from benchmarks.models import FullModel
from benchmarks.training import AUTOCAST, DEFAULT, FASTEST, HALF, SIDES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of all calls."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    arguments = (sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--device", "cpu", "--tiny")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.mark.parametrize("call", CALLS)
def test_every_stage_leaves_rows_or_says_why_not(call: str, tiny: Path) -> None:
    found = [row for row in rows.read(tiny) if row["call"] == call]
    stages = plan(call, "cpu", is_tiny=True)
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        mine = [row for row in found if row["stage"] == stage.name]
        assert mine, stage.name
        assert not [row for row in mine if "error" in row]
        if stage.skip:
            assert [row["skipped"] for row in mine] == ["needs CUDA"]
        else:
            assert mine[-1]["done"]
            assert len(mine) > 1
    assert not (tiny / "log.txt").exists()


@pytest.mark.parametrize("call", CALLS)
def test_every_stage_on_a_gpu_can_be_called(call: str) -> None:
    """The part that a machine without a GPU can test."""
    stages = plan(call, "cuda", is_tiny=False)
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        assert not stage.skip
        assert pickle.loads(pickle.dumps(stage)) == stage
        inspect.signature(stage.function()).bind(Given("cuda"), **stage.options)
        named = stage.options.get("models", [stage.options["model"]] if "model" in stage.options else [])
        assert {*named} <= models.MODELS.keys()
        assert {*stage.options.get("sides", ())} <= SIDES.keys()


def test_a_step_is_measured_on_every_side(tiny: Path) -> None:
    steps = [row for row in rows.read(tiny) if row["call"] == "B" and "step_ms" in row]
    assert {(row["model"], row["side"]) for row in steps} == {
        (model, side)
        for model in ("ResNet tiny", "BERT tiny")
        for side in (AUTOCAST, DEFAULT, "cached, fold=exact", FASTEST, HALF)
    }
    for row in steps:
        assert row["rounds"] == 2
        assert row["step_ms"] > 0 < row["backward_ms"]
        assert len(row["backward_to_autocast"]) == 3
        assert (row["step_to_autocast"] == [1, 1, 1]) == (row["side"] == AUTOCAST)


def test_what_is_converted_is_as_near_to_float64_as_autocast(tiny: Path) -> None:
    found = [row for row in rows.read(tiny) if row["stage"].startswith("parity")]
    assert len(found) == 1 + 2 * 5 + 1, "float32, five sides in two dtypes, and the end"
    for row in found:
        if row.get("dtype") == "float32":
            assert row["gradients_error"] < 1e-5
        elif row.get("side", "").endswith("fold=exact"):
            assert row["gradients_to_autocast"] < 1.2


def test_resume_runs_nothing_anew(tiny: Path, tmp_path: Path) -> None:
    before = rows.read(tiny)
    arguments = ["--device", "cpu", "--tiny"]
    assert command.main(["--out", str(tiny), "--resume", str(tiny), *arguments]) == 0
    assert rows.read(tiny) == before
    assert command.main(["--out", str(tmp_path), "--resume", str(tiny), *arguments]) == 0
    assert rows.read(tmp_path) == []


def test_the_table_says_what_was_measured_on_what(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([str(tiny)]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown.splitlines()[0]
    assert "\nEager step:\n\n| model | side | dtype | kind |" in shown
    assert f"\n| BERT tiny | {FASTEST} | float16 | eager |" in shown
    assert shown.rstrip().endswith("- compiled step, ResNet tiny, float16 (D): needs CUDA")


# ---- the command line -----------------------------------------------------------------------------------------------


def test_without_minutes_no_stage_starts(tmp_path: Path) -> None:
    assert command.main(["--out", str(tmp_path), "--minutes", "0", "--call", "A", "--device", "cpu", "--tiny"]) == 0
    assert rows.read(tmp_path) == []
    assert "A: not started: environment, ceilings, parity" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--call", "E"], "argument --call: invalid choice: 'E'"),
        (["--minutes", "-1"], "--minutes: 0 or more"),
        (["--resume", "nowhere"], "--resume: there is no folder nowhere"),
        ([], "holds rows: go on with --resume"),
    ],
)
def test_a_mistake_is_one_error(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.append(tmp_path, {"call": "A", "stage": "one", "done": True})
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_device_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "out")])
    assert "--device cuda: torch sees no CUDA device" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_line_that_is_no_row_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.append(tmp_path, {"call": "A"})
    with (tmp_path / rows.NAME).open("a") as file:
        file.write('{"call": \n')
    with pytest.raises(SystemExit):
        table.main([str(tmp_path)])
    assert f"{tmp_path / rows.NAME}:2: no JSON object" in capsys.readouterr().err


# ---- the runner -----------------------------------------------------------------------------------------------------


def _stage(function: str, **fields: Any) -> Stage:
    return Stage(function, f"tests.gpu_stages:{function}", **fields)


def _settings(out: Path, **fields: Any) -> Settings:
    return Settings("A", out, "cuda", time.monotonic() + 120, **fields)  # its stages need no device


def _ends(found: list[Row]) -> dict[str, str]:
    return {row["stage"]: row.get("error") or row.get("skipped") or "done" for row in found}


def test_a_stage_that_fails_crashes_or_hangs_is_a_row_and_the_others_run(tmp_path: Path) -> None:
    stages = [
        *(_stage("raises"), _stage("crashes"), _stage("hangs", seconds=1.5)),
        *(Stage("absent", "tests.gpu_stages:absent"), Stage("cannot", "", skip="no"), _stage("works")),
    ]
    found = run(stages, _settings(tmp_path, ahead=2))
    stored = rows.read(tmp_path)
    assert [row for row in stored if row in found] == found
    assert _ends([row for row in found if "seconds" in row]) == {
        "raises": "RuntimeError: out of memory",
        "crashes": "the process ended by SIGABRT",
        "hangs": "killed after 2 s: the stage's limit",
        "absent": "AttributeError: module 'tests.gpu_stages' has no attribute 'absent'",
        "works": "done",
    }
    assert [row for row in found if "skipped" in row] == [{"call": "A", "stage": "cannot", "skipped": "no"}]
    sides_of = {stage: [r["side"] for r in stored if r["stage"] == stage and "side" in r] for stage in _ends(found)}
    assert sides_of == {"raises": ["a"], "crashes": [], "hangs": ["a"], "absent": [], "cannot": [], "works": ["a", "b"]}
    log = (tmp_path / "log.txt").read_text()
    assert "---- A raises: RuntimeError: out of memory\nprinted before\n" in log
    assert 'raise RuntimeError("out of memory' in log
    assert "done" not in log


def test_what_failed_is_run_again_without_what_it_measured(tmp_path: Path) -> None:
    earlier: list[Row] = [
        {"call": "A", "stage": "works", "model": "model", "side": "a"},
        {"call": "A", "stage": "works", "model": "model", "side": "b", "error": "why"},
        {"call": "A", "stage": "works", "error": "killed"},
        {"call": "A", "stage": "raises", "done": True},
    ]
    always = replace(_stage("works"), name="always", always=True)
    assert (
        run([always, _stage("raises")], _settings(tmp_path, earlier=[*earlier, {**earlier[3], "stage": "always"}]))
        == []
    )
    assert _ends(run([always, _stage("works"), _stage("raises")], _settings(tmp_path, earlier=earlier))) == {
        "always": "done",
        "works": "done",
    }
    assert [row["side"] for row in rows.read(tmp_path) if row["stage"] == "works" and "side" in row] == ["b"]


def test_a_stage_prepares_while_another_measures(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    stages = [_stage("sees", options=options, seconds=60), _stage("prepares", options=options, prepares=True)]
    assert _ends(run(stages, _settings(tmp_path, ahead=1))) == {"sees": "done", "prepares": "done"}


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_a_side_that_fails_takes_part_no_more() -> None:
    calls: list[str] = []

    def fails() -> None:
        calls.append("b")
        if calls.count("b") > 3:
            raise RuntimeError("overflow")

    works = measure.Work({"step": lambda: calls.append("a")})
    times = measure.interleaved({"a": works, "b": measure.Work({"step": fails})}, Rounds(3, 3, 1, 2), "cpu")
    assert calls.count("a") == 2 + 3
    assert calls.count("b") == 4
    found = measure.timed(times, "a")
    assert found["b"] == {"error": "RuntimeError: overflow"}
    assert found["a"]["rounds"] == 3
    assert measure.timed(times, "b")["a"]["step_to_autocast"] == []


def test_rounds_beyond_the_least_end_with_the_time() -> None:
    work = {"a": measure.Work({"step": lambda: None})}
    assert len(measure.interleaved(work, Rounds(2, 50, 0, 1), "cpu").found["a"]["step"]) == 2
    assert len(measure.interleaved(work, Rounds(2, 5, 60, 1), "cpu").found["a"]["step"]) == 5


def test_kernels_of_attention_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(key: str, us: float, device: str = "CUDA") -> SimpleNamespace:
        kind = getattr(torch.autograd.DeviceType, device)
        return SimpleNamespace(key=key, count=2, self_device_time_total=us, device_type=kind)

    events = [event("gemm", 3000), event("flash_fwd", 1000), event("cudaLaunch", 4000, "CPU"), event("flash_bwd", 2000)]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profiler = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profiler))
    assert measure.kernels(lambda: None, most=2) == {
        "kernels": 6,
        "kernels_ms": 6.0,
        "attention": {"flash_bwd": 2, "flash_fwd": 2},
        "longest": {"gemm": 3.0, "flash_bwd": 2.0},
    }


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        self.attention_dropout = 0.1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.second(self.drop(self.first(x)).relu()).softmax(-1).square().mean(),)


def test_sides_of_one_capture_are_what_convert_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    monkeypatch.setitem(models.MODELS, "model", FullModel(_Model, lambda: inputs))
    found = sides.source("model", "cpu", dropout=False)
    assert isinstance(found.model, _Model)
    assert found.model.drop.p == found.model.attention_dropout == 0
    for name, dtype in sides.DTYPES.items():
        for weights, fold in (("cast", "exact"), ("cached", "kernel")):
            ours = found.converted(dtype, weights, fold)
            direct: Any = {"dtype": dtype, "weights": weights, "fold": fold, "keep_output_dtype": False}
            theirs = autocastfx.convert(found.model, (), inputs, **direct)
            assert ours.plan == theirs.plan, (name, weights, fold)
            assert ours(**inputs)[0].equal(theirs(**inputs)[0])


def test_samples_can_be_read_without_expecttest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "is_there", lambda: False)
    monkeypatch.delitem(sys.modules, "expecttest", raising=False)
    with samples.stand_in() as folder:
        assert sys.path[-1] == folder
        code = f"import sys; sys.path.insert(0, {folder!r}); import expecttest; print(expecttest.TestCase)"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == str(unittest.TestCase)
    assert folder not in sys.path
