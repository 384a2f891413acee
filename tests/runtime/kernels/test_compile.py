"""The Triton kernels compile for GPUs, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = {"_forward": 2 * 3 * 3, "_backward": 2 * 3 * 3, "_add_up": 2 * 3 * 2}  # capabilities, dtypes, variants


@pytest.mark.usefixtures("compiler")
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """In a process of its own, as the interpreter is chosen for a whole process."""
    paths = [os.fspath(SCRIPT.parents[3]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": os.fspath(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        [sys.executable, os.fspath(SCRIPT)], env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert {name: sum(line[0] == name for line in lines) for name in KERNELS} == KERNELS
    assert all(int(line[-1]) > 1000 for line in lines), "bytes of machine code"
