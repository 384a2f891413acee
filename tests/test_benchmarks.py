"""A benchmark resumes from its stored rows, and judges by its rule."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy, conversion, memory, optimizer_step, report
from benchmarks.command import Command
from benchmarks.models.tasks import TASKS, CharacterGPT
from benchmarks.store import Store

pytestmark = pytest.mark.usefixtures("threads_kept")

# ---- the command line and the store ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sides", "a|d"], "argument --sides: unknown: d; there are a| b| c"),
        (["--sizes", "1,many"], "argument --sizes: a number, not 'many'"),
        (["--sizes", "0"], "argument --sizes: at least 1"),
        (["--rounds", "1"], "argument --rounds: quartiles need two or more"),
    ],
)
def test_a_mistake_is_one_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("memory", "What it does.\n\nMore.")
    command.names("--sides", "abc", chosen="ab", separator="|")
    command.numbers("--sizes", (10, 20))
    command.rounds(6)
    with pytest.raises(SystemExit):
        command.begin(arguments)
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m benchmarks.memory: error: {said}"
    options = command.begin(["--sides", "c"])
    assert (options.sides, options.sizes, options.rounds, options.json) == (["c"], [10, 20], 6, None)
    assert command.begin([]).sides == ["a", "b"]


@dataclass(frozen=True)
class Row:
    model: str
    size: int
    found: float


def test_what_is_held_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, asked = tmp_path / "rows.json", [("a", 1), ("a", 2), ("b", 1)]

    def measure(pair: tuple[str, int]) -> list[Row]:
        if pair == fails:
            raise KeyboardInterrupt
        return [Row(*pair, 0.5)]

    fails = ("a", 2)
    with pytest.raises(KeyboardInterrupt):
        Store(path, Row, {"rounds": 2}).fill(asked, "model size", measure)
    assert json.loads(path.read_text())["rows"] == [{"model": "a", "size": 1, "found": 0.5}], "none is lost"
    capsys.readouterr()
    fails = ("a", 1)
    Store(path, Row, {"rounds": 2}).fill(asked, "model size", measure)
    assert capsys.readouterr().err.splitlines() == ["a, 2 ...", "b, 1 ..."]
    assert Store(path, Row, {"rounds": 2}).rows == [Row(*pair, 0.5) for pair in asked]
    assert Store(path, Row, {"rounds": 3}).rows == []
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "another"}))
    assert Store(path, Row, {"rounds": 2}).rows == []


# ---- conversion -----------------------------------------------------------------------------------------------------


def test_both_limits_of_conversion_hold_for_the_last_size() -> None:
    small, large = (conversion.Row("unet", nodes, 0.4, 5.1, 10.2, 7) for nodes in (3000, 10004))
    assert conversion.failures([small, large]) == [
        "unet: 10004 nodes placed in 5.1 s, the limit is 5 s",
        "unet: 10004 nodes converted in 10.2 s, the limit is 10 s",
    ]
    assert conversion.failures([replace(large, place=4.9, passes=9.9)]) == []


def test_passes_that_take_long_beside_the_capture_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversion, "REPEATS", 1)
    (row,) = conversion.in_both_modes("tied-weights")[:1]
    assert row.passes > 0
    assert 0 < row.share < 1
    good = conversion.ZooRow("good", "train", 100, 1.0, 0.5, "verify", 0.4)
    bad, worse = replace(good, model="bad", passes=0.51), replace(good, model="worse", passes=2.0)
    lines = conversion.zoo_table([good, bad, worse], shown=1).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["worse", "bad"], "what fails is shown in any case"
    assert lines[-1] == "3 rows of 3 models: ratio 0.51 in the median, 2.00 at most; above 0.5: 2"
    monkeypatch.setattr(conversion, "measure_model", lambda model, mode: replace(row, model=model.name, mode=mode))
    for ratio, status in ((0.1, 0), (2.0, 1)):
        row = replace(good, passes=ratio)
        arguments = ["--zoo", "--models", "bert,gpt2", "--json", str(tmp_path / f"{ratio}.json")]
        assert conversion.main(arguments) == conversion.main(arguments) == status
        assert len(json.loads((tmp_path / f"{ratio}.json").read_text())["rows"]) == 4
    assert "verify 40 %" in capsys.readouterr().out


# ---- a step of the optimizer ----------------------------------------------------------------------------------------


def test_what_does_not_hold_is_told() -> None:
    def row(side: str, parameters: int = 2, ratio: float = 0.9, reads: int = 1, frames: int = 9) -> Any:
        return optimizer_step.Row("SGD", parameters, side, 1.0, 2.0, 3.0, ratio, 5, reads, frames)

    bare = [row(optimizer_step.BARE, n, reads=0) for n in (2, 3)]
    assert optimizer_step.failures([row(optimizer_step.OURS), *bare]) == []
    wrong = row(optimizer_step.OURS, 3, ratio=1.2, reads=2, frames=10)
    time, reads, frames = optimizer_step.failures([row(optimizer_step.OURS), *bare, wrong])
    assert "1.200 times" in time
    assert "2 host reads more" in reads
    assert "9, 10 frames" in frames


# ---- memory of a parameter ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_bytes_of_a_parameter(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    other = torch.eye(3).to_sparse()
    assert memory.main(["--per-parameter", "--width", "128", "--json", str(path)]) == 0
    assert other.is_sparse  # what else lives in the process is left out, whatever it is
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    kinds = ("weights", "gradients", "masters", "state", "working", "total")
    known = {
        "float32": (4, 4, 0, 8, 0, 16),
        "torch.autocast float16, GradScaler": (4, 4, 0, 8, 0, 16),
        "float16 cast": (4, 4, 0, 8, 0, 16),
        "float16 cached": (4, 4, 0, 8, 2, 18),
        "float16 model.half(), masters": (2, 4, 4, 8, 0, 18),
        "bfloat16 model.bfloat16(), masters": (2, 4, 4, 8, 0, 18),
        "bfloat16 model.bfloat16(), split": (2, 4, 2, 8, 0, 16),
        "float16 low, inference": (2, 0, 0, 0, 0, 2),
    }
    assert rows.keys() == known.keys()
    for mode, sizes in known.items():  # inputs, the scale and the optimizer's step counters are some more
        assert [rows[mode][kind] for kind in kinds] == pytest.approx(sizes, abs=0.05), mode
    assert rows["float16 cast"]["optimizer_peak"] == pytest.approx(0, abs=0.05)
    wide = 2 + 2 / memory.DEPTH  # 16-bit gradients become float32 ones, one after the other
    assert rows["float16 model.half(), masters"]["optimizer_peak"] == pytest.approx(wide, abs=0.05)


# ---- accuracy -------------------------------------------------------------------------------------------------------


def _runs(mode: str, scores: list[float]) -> list[accuracy.Run]:
    protocol = TASKS["character GPT"].protocol
    return [accuracy.Run("character GPT", mode, seed, protocol, s, 0, 1.0) for seed, s in enumerate(scores)]


def test_runs_that_are_held_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, trained = tmp_path / "runs.json", list[tuple[str, str, int]]()

    def train(name: str, task: Any, mode: str, seed: int) -> accuracy.Run:
        trained.append((name, mode, seed))
        return accuracy.Run(name, mode, seed, task.protocol, 2.0, 0, 1.0)

    monkeypatch.setattr(accuracy, "train", train)
    monkeypatch.setattr(CharacterGPT, "seeds", 1)
    arguments = ["--tasks", "character GPT", "--modes", "float32,bfloat16 cast", "--json", str(path)]
    assert accuracy.main(arguments) == accuracy.main(arguments) == 0
    assert trained == [("character GPT", "float32", 0), ("character GPT", "bfloat16 cast", 0)]
    assert [row["difference"] for row in json.loads(path.read_text())["rows"]] == [0, 0]
    monkeypatch.setattr(accuracy, "TASKS", {**TASKS, "character GPT": replace(TASKS["character GPT"], rate=2e-3)})
    accuracy.main(arguments)
    assert len(trained) == 4, "by another protocol"


def test_a_mean_too_far_away_fails() -> None:
    near, far = _runs("bfloat16 cast", [2.02, 2.08, 2.2]), _runs("float16 cast", [2.02, 2.12, 2.22])
    rows = accuracy.summary([*_runs("float32", [2.0, 2.1, 2.2]), *near, *far, *_runs("float16 cached", [2.0])])
    assert [(row.mode, row.passed) for row in rows] == [
        *(("float32", True), ("bfloat16 cast", True), ("float16 cast", False))
    ]
    assert rows[2].difference == pytest.approx(0.02)
    assert accuracy.failures(rows) == [rows[2]]
    assert accuracy.failures([replace(rows[0], mode=accuracy.UNSCALED)]) != [], "it has to be bad"


def test_the_results_that_are_kept_hold() -> None:
    rows = accuracy.summary(accuracy.read(report.RESULTS / "accuracy-cpu.json"))
    assert {(row.task, row.mode) for row in rows} == {
        (task, mode) for task in TASKS for mode in accuracy.MODES if mode != accuracy.UNSCALED or task == "underflow"
    }
    assert accuracy.failures(rows) == []
    held = json.loads((report.RESULTS / "optimizer-step-cpu.json").read_text())["rows"]
    assert optimizer_step.failures([optimizer_step.Row(**row) for row in held]) == []
