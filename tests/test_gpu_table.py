"""The tables of ``benchmarks.gpu``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.gpu import rows, table
from benchmarks.gpu.stage import Row
from benchmarks.training import AUTOCAST, DEFAULT


def test_no_ratio_crosses_cards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for card, side, peak in (("H100", AUTOCAST, 2e9), ("H200", DEFAULT, 1e9)):
        for name in (AUTOCAST, side) if card == "H100" else (side,):
            rows.append(tmp_path, {"card": card, "stage": "memory, m", "model": "m", "side": name, "peak": peak})
    table.main([str(tmp_path)])
    assert "0.500" not in capsys.readouterr().out


def test_the_short_table_fits_and_says_what_is_left_out() -> None:
    held: list[Row] = [
        {"card": "card", "stage": f"stage {n}", "model": "model " * 20, "side": "a", "rounds": n} for n in range(200)
    ]
    shown = table.short(held, "card", 2000)
    assert len(shown) <= 2000
    assert re.search(r"\n\.\.\. \d+ more lines: python -m benchmarks\.gpu\.table DIR$", shown)
    assert "more lines" not in table.short(held[:2], "card", 2000)


def _told(ours: dict[str, float], theirs: dict[str, float], ratio: list[float], stage: str = "eager step, m") -> str:
    """Return what is told of a step of 10 ms whose kernels of the eager step are known; empty if nothing is."""
    row: Row = {"card": "card", "dtype": "float16", "model": "m", "step_ms": 10.0, "stage": stage}
    held: list[Row] = [{**row, "side": DEFAULT, "step_to_autocast": ratio}]
    for side, longest in ((DEFAULT, ours), (AUTOCAST, theirs)):
        profile: Row = {"model": "m, kernels", "side": side, "kernels": 3, "longest": longest}
        held.append({**row, "stage": "eager step, m", **profile, "kernels_ms": sum(longest.values())})
    found = re.findall(rf"^- {stage}, {DEFAULT}, float16: (.*)$", table.markdown(held), re.MULTILINE)
    return found[0] if found else ""


def test_what_is_slower_is_told_with_its_kernels() -> None:
    clearly = [1.1, 1.25, 1.5]
    for ours, theirs, said in (
        ({"gemm": 2.0, "norm": 1.5}, {"gemm": 2.0, "norm": 0.5}, "norm +1.00 ms"),
        ({"gemm": 2.0, "norm": 1.5}, {"gemm": 1.0}, "norm at most +1.50 ms, gemm +1.00 ms"),
        ({"void at::native::(anonymous namespace)::norm<float>": 3.0}, {}, "norm<float> at most +3.00 ms"),
        (dict.fromkeys("abcd", 3.0), {}, "a at most +3.00 ms, b at most +3.00 ms, c at most +3.00 ms"),
        (
            {"gemm": 2.09, "norm": 0.5},  # less than 1 % of the step more
            {"gemm": 2.0, "norm": 0.5},
            "no single kernel takes longer: 2.59 ms of kernels against 2.50, the rest is the host's",
        ),
    ):
        assert _told(ours, theirs, clearly) == f"1.250; {said}"


def test_only_medians_above_1_are_slower_and_only_kernels_of_the_same_stage_explain_it() -> None:
    assert _told({"gemm": 3.0}, {"gemm": 2.0}, [1.1, 1.25, 1.5], "compiled step, m") == "1.250; not profiled"
    assert _told({}, {}, [0.5, 1.0, 1.5]) == ""
    assert _told({"a": 1.0}, {"a": 0.5}, [0.9, 1.004, 1.1]) == "1.004, 1 is within the quartiles; a +0.50 ms"


def _steps(card: str, *names: str) -> list[Row]:
    """Return a row for torch.autocast and the default, with these ways to time a step, and one with its kernels."""
    rows: list[Row] = []
    for side, ms, ratios in ((AUTOCAST, 20.0, [1.0, 1.0, 1.0]), (DEFAULT, 10.0, [0.4, 0.5, 0.6])):
        row: Row = {"card": card, "stage": "eager step, m", "model": "m", "dtype": "float16", "side": side}
        times = {f"{name}_{key}": value for name in names for key, value in (("ms", ms), ("to_autocast", ratios))}
        rows += [{**row, **times}, {**row, "model": "m, kernels", "kernels": 3, "kernels_ms": ms / 2, "longest": {}}]
    return rows


def test_old_rows_show_what_they_have() -> None:
    """They have no steps back to back, and kernels of one step, without quartiles."""
    head = "| model | dtype | side | step, ms | step, ratio | kernels, ms | kernels, ratio | number of kernels |"
    ours = f"| m | float16 | {DEFAULT} | 10 | 0.500 (0.400 to 0.600) | 5 | 0.500 | 3 |"
    shown = table.markdown(_steps("NVIDIA H200", "step"))
    assert f"{head}\n| --- |" in shown
    assert f"\n| m | float16 | {AUTOCAST} | 20 |  | 10 |  | 3 |\n{ours}" in shown
    renewed = [{**row, "commit": "new"} if "step_ms" in row else row for row in _steps("NVIDIA H200", "step")]
    assert f"\n| m | float16 | {DEFAULT} |  |  | 5 | 0.500 | 3 |" in table.markdown(renewed), "not of one commit"
    old = table.step_summary(_steps("NVIDIA H200", "step"))
    assert "the device idle before it, to torch.autocast's, with quartiles" in old
    assert "| m | float16 | 0.50 (0.40 to 0.60) |" in old
    mixed = [*_steps("NVIDIA H200", "step"), {**_steps("NVIDIA H200", "step", "queued")[2], "model": "n"}]
    assert "the device idle before it" in table.step_summary(mixed)
    assert "one of several run back to back" in table.step_summary(_steps("NVIDIA H200", "step", "queued"))


@pytest.mark.parametrize(("card", "share"), [("NVIDIA H200", "50.0%"), ("NVIDIA H100 80GB HBM3", "50.0%"), ("A", "")])
def test_throughput_and_the_share_of_the_peak_are_of_steps_back_to_back(card: str, share: str) -> None:
    """989.4 TFLOP/s: 4.947 TFLOP in 10 ms are half of it. An unknown card has no peak."""
    work = {"items": 4096, "flops": 4.947e12, "step_ms": 99.0}
    shown = table.markdown([{**row, **work} if "queued_ms" in row else row for row in _steps(card, "step", "queued")])
    assert ("| MFU |" in shown) == bool(share)
    ours = next(line for line in shown.splitlines() if f"| {DEFAULT} | " in line)
    assert ours.endswith(f" | 0.500 | 409,600 |{f' {share} |' if share else ''} 3 |")


def test_rows_that_the_code_has_outrun_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the paths of their stage; what was measured at two commits is told apart."""
    asked: dict[str, tuple[str, ...]] = {}

    def changed(commit: str, paths: tuple[str, ...]) -> bool:
        asked.setdefault(commit, paths)
        return commit == "old"

    monkeypatch.setattr(table, "changed_since", changed)
    monkeypatch.setattr(table, "day_of", lambda commit: "2026-01-01")
    base: Row = {"card": "card", "side": AUTOCAST, "model": "m", "peak": 1}
    memory: Row = {**base, "stage": "memory, BERT-large b32 s512", "commit": "new"}
    optimizer: Row = {"card": "card", "stage": "optimizer", "model": "a", "waits": True, "commit": "old"}
    said = "Measured before the code changed that decides the figures: optimizer at commit old of 2026-01-01."
    assert said in table.markdown([memory, optimizer])
    assert said.replace(": optimizer", ": all") in table.markdown([optimizer])
    assert "Measured before" not in table.markdown([memory, {**optimizer, "commit": ""}])
    assert asked["old"] == ("autocastfx/training", "benchmarks/gpu/measure.py", "benchmarks/gpu/stages/optimizer.py")
    assert "autocastfx/passes" in asked["new"]
    one, other = ({**_steps("card", "step")[2], "model": name, "commit": name} for name in ("new", "old"))
    assert "figures: old at commit old of 2026-01-01." in table.step_summary([one, other])


def test_git_says_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a commit and the files that are there, committed or not; nothing is claimed without git."""

    def git(*arguments: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ("git", *named, *arguments), cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    machine.changed_since.cache_clear()
    assert not machine.changed_since("HEAD", ("a",)), "no repository"
    git("init", "-q")
    for name in "ab":
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short", "HEAD")
    (tmp_path / "a").write_text("2")
    assert machine.changed_since(commit, ("a",))
    assert not machine.changed_since(commit, ("b",))
    git("commit", "-qam", "two")
    assert machine.changed_since(f"{commit}-dirty", ("a", "b"))
    assert not machine.changed_since("0123456", ("a",)), "a commit that is not there"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", machine.day_of(commit))
    monkeypatch.setenv("PATH", "")
    assert not machine.changed_since(commit, ("a", "c"))
    machine.changed_since.cache_clear()


def test_rows_of_a_stage_share_a_table_and_no_cell_is_long() -> None:
    base: Row = {"card": "card", "model": "m", "dtype": "float16"}
    waiting: Row = {**base, "stage": "waiting for the device"}
    facts: Row = {"card": "card", "stage": "kernel facts", "dtype": "float16"}
    step: Row = {**base, "stage": "eager step, m", "model": "m, kernels", "kernels": 3, "kernels_ms": 1.5}
    shown = table.markdown(
        [
            {**waiting, "side": "a", "waits": False},
            {**waiting, "side": "b", "waits": True, "why": "sync " * 100},
            {**facts, "model": "mixed_args", "differ": [], "losses": [2.0, 1.5, 1.0]},
            {**facts, "model": "no_kernel", "missing": {f"op{n}": "has no kernel" for n in range(40)}},
            *(
                {**step, "side": kind, "attention": dict.fromkeys(names, 2), "longest": {"gemm": 1.0}}
                for kind, names in {
                    "a": ("gemm_cutlass", "cudnn_generated_native_sdpa_flash_bprop"),
                    "b": ("pytorch_flash::flash_fwd", "cudnn::batchnorm"),
                    "c": ("fmha_cutlassF_f16",),
                    "d": ("cudnn::batchnorm", "cunn_SoftMaxForward"),
                }.items()
            ),
        ]
    )
    assert re.findall(r"^(?!\|).+", shown, re.MULTILINE) == [
        "Training steps, in milliseconds, and as ratios to torch.autocast's:",
        *("Waiting for the device:", "Kernel facts, mixed_args:", "Kernel facts, no_kernel:"),
    ]
    assert "| model | side | dtype | waits | why |" in shown
    assert "| m | a | float16 | no |  |" in shown
    assert "| mixed_args | float16 | none | 2, 1.5, 1 |" in shown
    assert "| no_kernel | float16 | 40 entries |" in shown
    kinds = {"a": "cudnn", "b": "flash", "c": "efficient", "d": "other or none"}
    assert all(f"| m | float16 | {side} | 1.5 | 3 | {kind} |" in shown for side, kind in kinds.items())
    assert max(map(len, re.split(r" \||\n", shown))) <= table.WIDEST + 4, "a cell, its space and ..."
