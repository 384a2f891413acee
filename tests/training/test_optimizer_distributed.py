"""LossScalingOptimizer in several processes that torchrun starts: distributed_cases.py holds the cases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training import distributed_cases

ROOT = Path(__file__).resolve().parents[2]


ALL = tuple(distributed_cases.CASES)
OF_TWO_GROUPS = tuple(name for name in ALL if name.split("[")[0] in distributed_cases.OF_TWO_GROUPS)


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, ALL), (4, OF_TWO_GROUPS), pytest.param(4, ALL, marks=pytest.mark.slow)],
    ids=["2", "4 in two groups", "4"],
)
def test_all_cases_hold_in_every_process(processes: int, cases: tuple[str, ...], tmp_path: Path) -> None:
    """One test for all cases, because starting processes takes longer than the cases themselves."""
    ran = start(processes, tmp_path / "first", cases)
    found = results(tmp_path / "first")
    if ended_by_a_signal(ran.stderr):
        # This package has no native code: torch or gloo crashed, as they do now and then. The others lost a peer.
        ran = start(processes, tmp_path / "second", cases)
        found = results(tmp_path / "second")
    failed = [f"{name}, process {rank}:\n{trace}" for rank, f in found.items() for name, trace in f["failed"].items()]
    assert not failed, "\n".join(failed) + ran.stderr[-3000:]
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [found[str(rank)]["ran"] for rank in range(processes)] == [list(cases)] * processes


def start(processes: int, folder: Path, cases: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*torchrun, distributed_cases.__file__, os.fspath(folder), *cases],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def ended_by_a_signal(stderr: str) -> bool:
    """True where torchrun reports a process that crashed; -15 is one that torchrun itself ended."""
    return any(code != "-15" for code in re.findall(r"exitcode *: (-\d+)", stderr))


def test_a_crash_is_told_from_a_failure() -> None:
    assert ended_by_a_signal("  exitcode  : -15 (pid: 1)\n  exitcode  : -6 (pid: 2)")
    assert not ended_by_a_signal("  exitcode  : 1 (pid: 1)\n  exitcode  : -15 (pid: 2)")
