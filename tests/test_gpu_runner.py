"""How ``benchmarks.gpu`` keeps rows, runs stages that fail, and measures sides that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import measure, rows, runner, table
from benchmarks.gpu.runner import Settings, run
from benchmarks.gpu.stage import Rounds, Row, Stage

ROOT = Path(__file__).resolve().parents[1]

# ---- rows -----------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.append(tmp_path, {"card": "card", "stage": "one", "done": True})
    with (tmp_path / rows.NAME).open("a") as file:
        file.write('{"card": "card", "sta')
    rows.append(tmp_path, {"card": "card", "stage": "two", "done": True})
    assert [row["stage"] for row in rows.read(tmp_path)] == ["one", "two"]
    assert f"{tmp_path / rows.NAME}:2: no row, left out" in capsys.readouterr().err
    assert rows.ended(rows.read(tmp_path), "card") == {"one", "two"}
    assert table.main([str(tmp_path)]) == 0


def test_rows_of_another_card_count_for_nothing() -> None:
    held: list[Row] = [
        {"card": "H100", "stage": "one", "model": "model", "side": "a"},
        {"card": "H100", "stage": "one", "done": True},
    ]
    assert rows.ended(held, "H100") == {"one"}
    assert rows.measured(held, "H100", "one") == {("model", "a", "")}
    assert rows.ended(held, "H200") == rows.measured(held, "H200", "one") == frozenset()


def test_a_stage_one_of_whose_sides_failed_is_run_again_until_it_does_not() -> None:
    held: list[Row] = [
        {"card": "H100", "stage": "one", "model": "model", "side": "a", "error": "RuntimeError: CUDA error"},
        {"card": "H100", "stage": "one", "done": True},
    ]
    assert rows.ended(held, "H100") == set()
    assert rows.ended([*held, {"card": "H100", "stage": "one", "model": "model", "side": "a"}], "H100") == {"one"}


def test_the_last_row_of_a_key_counts_and_partial_ones_are_measured_again() -> None:
    first: Row = {"card": "card", "stage": "one", "model": "model", "side": "a", "rounds": 2, "partial": True}
    last: Row = {"card": "card", "stage": "one", "model": "model", "side": "a", "rounds": 6}
    assert rows.measured([first], "card", "one") == frozenset()
    assert rows.latest([first, last]) == [last]
    assert rows.measured([first, last], "card", "one") == {("model", "a", "")}


def test_measured_rows_are_added_to_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one: Row = {"card": "card", "stage": "one", "model": "m", "side": "a"}
    (tmp_path / "out").mkdir()
    for count in (2, 3):
        rows.append(tmp_path / "out", {**one, "rounds": count})
    arguments = [str(tmp_path / "out"), "--into", str(tmp_path / "results")]
    assert rows.main(arguments) == rows.main(arguments) == 0
    assert rows.read(tmp_path / "results") == [{**one, "rounds": 3}]
    with pytest.raises(SystemExit):
        rows.main([str(tmp_path / "nowhere")])
    assert "no rows in" in capsys.readouterr().err


# ---- the runner -----------------------------------------------------------------------------------------------------


def _stage(function: str, **fields: Any) -> Stage:
    return Stage(fields.pop("name", function), f"tests.gpu_stages:{function}", **fields)


def _settings(out: Path, **fields: Any) -> Settings:
    return Settings(1, out, "cuda", "card", time.monotonic() + 120, **fields)  # its stages need no device


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
    skipped = {"card": "card", "call": 1, "commit": "", "stage": "cannot", "skipped": "no"}
    assert [row for row in found if "skipped" in row] == [skipped]
    sides_of = {stage: [r["side"] for r in stored if r["stage"] == stage and "side" in r] for stage in _ends(found)}
    assert sides_of == {"raises": ["a"], "crashes": [], "hangs": ["a"], "absent": [], "cannot": [], "works": ["a", "b"]}
    log = (tmp_path / "log.txt").read_text()
    assert "---- 1 raises: RuntimeError: out of memory\nprinted before\n" in log
    assert 'raise RuntimeError("out of memory' in log


def test_what_failed_is_run_again_without_what_it_measured(tmp_path: Path) -> None:
    earlier: list[Row] = [
        {"card": "card", "stage": "works", "model": "model", "side": "a"},
        {"card": "card", "stage": "works", "model": "model", "side": "b", "error": "why"},
        {"card": "card", "stage": "works", "error": "killed"},
        {"card": "card", "stage": "raises", "done": True},
        {"card": "another", "stage": "works", "done": True},
    ]
    always = _stage("works", name="always", always=True)
    ended = [*earlier, {**earlier[3], "stage": "always"}]
    assert run([always, _stage("raises")], _settings(tmp_path, earlier=ended)) == []
    assert _ends(run([always, _stage("works"), _stage("raises")], _settings(tmp_path, earlier=earlier))) == {
        "always": "done",
        "works": "done",
    }
    assert [row["side"] for row in rows.read(tmp_path) if row["stage"] == "works" and "side" in row] == ["b"]


def test_a_stage_prepares_before_another_measures(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    stages = [_stage("sees", options=options, seconds=60), _stage("prepares", options=options, prepares=True)]
    assert _ends(run(stages, _settings(tmp_path, ahead=1))) == {"sees": "done", "prepares": "done"}


def test_nothing_prepares_while_a_stage_measures(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"options": {"folder": str(tmp_path)}, "prepares": True}
    stages = [_stage("prepares_long", name=f"stage {n}", **fields) for n in range(5)]
    stages.append(_stage("prepares_long", name="early", early=True, **fields))
    found = run(stages, _settings(tmp_path, ahead=1))
    assert [*_ends(found)] == [f"stage {n}" for n in range(5)] + ["early"]
    assert [row["others"] for row in rows.read(tmp_path) if "others" in row] == [0] * 6


def test_a_process_that_prepares_for_ever_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PATIENCE", 1)
    stages = [_stage("works"), _stage("hangs", prepares=True, seconds=1)]
    found = _ends(run(stages, _settings(tmp_path, ahead=1)))
    assert found == {"works": "done", "hangs": "killed after 1 s: the stage's limit"}


def test_an_early_stage_prepares_from_the_beginning_on(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    late = _stage("prepares", options=options, prepares=True, early=True)
    stages = [_stage("sees", options=options, seconds=60), _stage("works"), late]
    assert [*_ends(run(stages, _settings(tmp_path)))] == ["sees", "works", "prepares"]


@pytest.mark.parametrize(("alone", "together", "most"), [(False, 2, 2), (True, 3, 1)])
def test_what_times_nothing_works_side_by_side(alone: bool, together: int, most: int, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "most": most}
    stages = [_stage("counts", name=f"counts {n}", options=options, alone=alone) for n in range(3)]
    found = run([*stages, _stage("works")], _settings(tmp_path, together=together))
    assert set(_ends(found).values()) == {"done"}
    assert found[-1]["stage"] == "works"
    seen = [row["working"] for row in rows.read(tmp_path) if "working" in row]
    assert max(seen) == most


@pytest.mark.parametrize("helps", [True, False])
def test_an_environment_that_helps_is_kept(helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTHER_WAY", raising=False)
    smoke = _stage("needs", options={"value": "1" if helps else "2"}, fallback={"OTHER_WAY": "1"})
    found = run([smoke, _stage("tells")], _settings(tmp_path, ahead=1))
    assert [*_ends(found)] == ["needs", "needs, OTHER_WAY=1", "tells"]
    assert (_ends(found)["needs, OTHER_WAY=1"] == "done") == helps
    assert [row["way"] for row in rows.read(tmp_path) if "way" in row] == ["1" if helps else ""]
    assert "OTHER_WAY" not in os.environ


KILLED = """
import sys, time
from pathlib import Path
from benchmarks.gpu.runner import Settings, run
from benchmarks.gpu.stage import Stage
stages = [Stage("slow", "tests.gpu_stages:slow"), Stage("works", "tests.gpu_stages:works")]
if __name__ == "__main__":
    run(stages, Settings(1, Path(sys.argv[1]), "cuda", "card", time.monotonic() + 120))
"""


def test_kill_9_loses_one_side_and_resume_runs_the_rest(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    runner = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)})

    def measured() -> list[Row]:
        return [row for row in rows.read(tmp_path) if "side" in row]

    _until(lambda: len(measured()) == 2)
    runner.kill()
    runner.wait()
    (process,) = {row["process"] for row in measured()}
    _until(lambda: not Path(f"/proc/{process}").exists())  # or it would keep the device busy
    assert [row["side"] for row in measured()] == ["a", "b"]

    stages = [_stage("slow", options={"seconds": 0}), _stage("works")]
    assert _ends(run(stages, _settings(tmp_path, earlier=rows.read(tmp_path)))) == {"slow": "done", "works": "done"}
    assert [(row["stage"], row["side"]) for row in measured()] == [
        *(("slow", side) for side in "abcd"),
        *(("works", side) for side in "ab"),
    ]


def _until(holds: Callable[[], bool], seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_a_side_that_fails_takes_part_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def fails() -> None:
        calls.append("b")
        if calls.count("b") > 3:
            raise RuntimeError("overflow")

    rounds = Rounds(3, 3, 1, 2)
    work = {"a": measure.Work({"step": lambda: calls.append("a")}), "b": measure.Work({"step": fails})}
    *_, times = measure.interleaved(work, rounds, "cpu")
    assert calls.count("a") == 2 + 3
    assert calls.count("b") == 4
    found = measure.timed(times, rounds, "a")
    assert found["b"] == {"error": "RuntimeError: overflow"}
    assert found["a"]["rounds"] == 3
    assert measure.timed(times, rounds, "b")["a"]["step_to_autocast"] == []
    assert "Traceback" in capsys.readouterr().err, "for log.txt"


def test_a_side_that_runs_out_of_memory_gives_back_what_it_holds() -> None:
    def fails(layer: torch.nn.Module) -> None:
        raise torch.OutOfMemoryError(f"no memory for {layer}")

    layer = torch.nn.Linear(2, 2)
    alive = weakref.ref(layer)
    work = {"a": measure.Work({"step": partial(fails, layer)}), "b": measure.Work({"step": lambda: None})}
    del layer
    seen = [alive() is None for _ in measure.interleaved(work, Rounds(2, 2, 1, 1), "cpu")]
    assert seen == [True, True]
    assert [*work] == ["b"]


def test_the_times_of_each_round_are_known_at_once() -> None:
    rounds = Rounds(3, 4, 60, 1)
    work = {side: measure.Work({"backward": lambda: None, "step": lambda: None}) for side in "ab"}
    seen = [measure.timed(times, rounds, "a") for times in measure.interleaved(work, rounds, "cpu")]
    assert [{side: row["rounds"] for side, row in found.items()} for found in seen] == [
        *({}, {"a": 2, "b": 2}, {"a": 3, "b": 3}, {"a": 4, "b": 4})
    ]
    assert [found["b"].get("partial") for found in seen[1:]] == [True, None, None]


def test_queued_steps_wait_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    parts = {name: partial(done.append, name) for name in ("backward", "step")}
    assert measure.queued({**parts, "sleep": lambda: time.sleep(0.01)}, "cuda", 3)["queued"] == pytest.approx(10, 0.5)
    assert done == ["wait", *["backward", "step"] * 3, "wait"]


def test_queued_steps_are_compared_within_a_round() -> None:
    """Each round has a step alone and queued ones, for which a side is prepared anew."""
    calls: list[str] = []
    work = {
        side: measure.Work({"step": partial(calls.append, side)}, partial(calls.append, f"prepare {side}"))
        for side in "ab"
    }
    rounds = Rounds(3, 3, 1, 1, 2)
    *_, times = measure.interleaved(work, rounds, "cpu")
    one = ["prepare a", "a", "prepare a", "a", "a"]
    assert calls[:4] == ["prepare a", "a", "prepare b", "b"], "to warm up, none is queued"
    assert calls[4:14] == [call.translate({97: "b"}) if call == "a" else call.replace(" a", " b") for call in one] + one
    found = measure.timed(times, rounds, "a")
    assert {side: len(row["queued_to_autocast"]) for side, row in found.items()} == {"a": 3, "b": 3}
    assert found["a"]["queued_to_autocast"] == [1, 1, 1]


class _Event:
    """A CUDA event that takes the time of the host."""

    at = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = 1e3 * time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


@pytest.mark.parametrize("names", [("backward", "step"), ("",), ("start", "", "end")])
def test_parts_of_any_name_are_timed_by_events(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    spent = measure.elapsed(dict.fromkeys(names, lambda: time.sleep(0.002)), "cuda")
    assert [*spent] == [*names]
    assert all(spent[name] >= 2 * count for count, name in enumerate(names, 1))


def test_kernels_of_attention_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(key: str, us: float, device: str = "CUDA") -> SimpleNamespace:
        kind = getattr(torch.autograd.DeviceType, device)
        return SimpleNamespace(key=key, count=2, self_device_time_total=us, device_type=kind)

    events = [event("gemm", 2500), event("flash_fwd", 1000), event("cudaLaunch", 4000, "CPU"), event("flash_bwd", 2000)]
    events += [event("flash_fwd<" + "float, " * 20 + variant, 1100) for variant in "ab"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profiler = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profiler))
    found = measure.kernels(lambda: None, most=3)
    both = found["attention"].keys() - {"flash_bwd", "flash_fwd"}
    assert found == {
        "kernels": 10,
        "kernels_ms": 7.7,
        "attention": {"flash_bwd": 2, "flash_fwd": 2, **dict.fromkeys(both, 4)},
        "longest": {"gemm": 2.5, **dict.fromkeys(both, 2.2), "flash_bwd": 2.0},
    }
    assert [len(name) for name in both] == [120]
