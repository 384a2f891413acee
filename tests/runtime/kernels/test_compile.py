"""The Triton kernels compile for GPUs as they are launched there, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
# Of each dtype: widths of a norm, one of them with weights of two dtypes, and vocabularies; each with its
# variants. Of a 16-bit dtype: optimizers, sizes, with a skip or without.
KERNELS = {
    "rms_norm _forward": 8 * 2,
    "rms_norm _backward": 8 * 3,
    "rms_norm _add_up": 8,
    "cross_entropy _forward": 2 * 2,
    "cross_entropy _backward": 2 * 3,
}
STEPS = {"step_kernel _step": 3 * 2 * 2}
# On a GPU with float8: three widths of bfloat16 and one of each other dtype, for one layout and for both.
QUANTIZE = {"quantize _by_rows": 1, "quantize _largest": 2, "quantize _scales": 2, "quantize _write": 2}
DTYPES = ("bfloat16", "float16", "float32")
# Of a program's number and the size of its block, and of a row among at most 512 or a block among four: small numbers.
MULTIPLIED_IN_32_BITS = {
    "cross_entropy _backward": 1, "rms_norm _add_up": 2, "quantize _largest": 1, "quantize _scales": 1,
}  # fmt: skip


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        pytest.param(80, DTYPES, id="A100", marks=pytest.mark.slow),
        pytest.param(90, DTYPES[1:], id="H100", marks=pytest.mark.slow),
        pytest.param(90, DTYPES[:1], id="H100, bfloat16"),
    ],
)
def test_every_kernel_compiles(capability: int, dtypes: Sequence[str], tmp_path: Path) -> None:
    """Without spilled registers, and with places in 64 bits. In a process of its own, which is not interpreted."""
    paths = [os.fspath(SCRIPT.parents[3]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": os.fspath(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        [sys.executable, os.fspath(SCRIPT), str(capability), os.fspath(tmp_path), *dtypes],
        env={**os.environ, **own}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    wanted = Counter[str]()
    for dtype in dtypes:
        of_dtype = [KERNELS, *([STEPS] if dtype != "float32" else [])]
        of_dtype += [QUANTIZE] * (3 if dtype == "bfloat16" else 1) if capability > 80 else []
        for counts in of_dtype:
            wanted.update(counts)
    assert Counter(" ".join(line[:2]) for line in lines) == wanted
    for module, name, *of, registers, stack, narrow in lines:
        assert int(registers) > 0, of
        assert int(stack) == 0, (module, name, of)
        assert int(narrow) == MULTIPLIED_IN_32_BITS.get(f"{module} {name}", 0), (module, name, of)
