"""LossScalingOptimizer in several processes: distributed_cases.py holds the cases."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from tests.processes import run_in_processes
from tests.training import distributed_cases

ALL = tuple(distributed_cases.CASES)
OF_TWO_GROUPS = tuple(name for name in ALL if name.split("[")[0] in distributed_cases.OF_TWO_GROUPS)


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, ALL), (4, OF_TWO_GROUPS), pytest.param(4, ALL, marks=pytest.mark.slow)],
    ids=["2", "4 in two groups", "4"],
)
def test_all_cases_hold_in_every_process(processes: int, cases: tuple[str, ...], tmp_path: Path) -> None:
    """One test for all cases, because starting processes takes longer than the cases themselves."""
    folder = tmp_path / "first"
    try:
        run_in_processes(distributed_cases.run, processes, folder, cases)
    except ProcessExitedException as e:
        if e.exit_code >= 0:
            raise
        # This package has no native code: torch or gloo crashed, as they do now and then. The others lost a peer.
        folder = tmp_path / "second"
        run_in_processes(distributed_cases.run, processes, folder, cases)
    found = results(folder)
    failed = [f"{name}, process {rank}:\n{trace}" for rank, f in found.items() for name, trace in f["failed"].items()]
    assert not failed, "\n".join(failed)
    assert [found[str(rank)]["ran"] for rank in range(processes)] == [list(cases)] * processes


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def fail(folder: Path, how: str) -> None:
    if dist.get_rank() == 0:
        if how == "crash":
            os.kill(os.getpid(), signal.SIGABRT)
        raise ValueError("wrong")


def test_a_crash_is_told_from_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException) as crash:
        run_in_processes(fail, 2, tmp_path / "crash", "crash")
    assert crash.value.exit_code == -signal.SIGABRT
    with pytest.raises(ProcessRaisedException, match="ValueError: wrong"):
        run_in_processes(fail, 2, tmp_path / "error", "error")
