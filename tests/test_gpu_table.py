"""The tables of ``benchmarks.gpu``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
        *("Waiting for the device:", "Kernel facts, mixed_args:", "Kernel facts, no_kernel:", "Eager step, kernels:")
    ]
    assert "| model | side | dtype | waits | why |" in shown
    assert "| m | a | float16 | no |  |" in shown
    assert "| mixed_args | float16 | none | 2, 1.5, 1 |" in shown
    assert "| no_kernel | float16 | 40 entries |" in shown
    kinds = {"a": "cudnn", "b": "flash", "c": "efficient", "d": "other or none"}
    assert all(f"| m, kernels | {side} | float16 | 3 | 1.5 | {kind} |" in shown for side, kind in kinds.items())
    assert max(map(len, re.split(r" \||\n", shown))) <= table.WIDEST + 4, "a cell, its space and ..."
