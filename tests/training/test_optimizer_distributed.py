"""LossScalingOptimizer in several processes that torchrun starts: distributed_cases.py holds the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import distributed_cases

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("processes", [2, 4])
def test_all_cases_hold_in_every_process(processes: int, tmp_path: Path) -> None:
    """One test for all cases, because starting processes takes longer than the cases themselves."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    ran = subprocess.run(
        [*torchrun, distributed_cases.__file__, os.fspath(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    failed = [f"{name}, process {rank}:\n{trace}" for rank, f in found.items() for name, trace in f["failed"].items()]
    assert not failed, "\n".join(failed)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [found[str(rank)]["ran"] for rank in range(processes)] == [list(distributed_cases.CASES)] * processes
