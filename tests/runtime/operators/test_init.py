"""Code that torch.compile has on disk is not taken for another version of this package's operators."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.compiler

import autocastfx
from autocastfx.runtime import operators

PACKAGE = Path(autocastfx.__file__).parent
TAG = "import torch.compiler; import autocastfx.runtime.operators; print(torch.compiler.config.cache_key_tag)"
THEIRS = {"TORCH_COMPILE_CACHE_KEY_TAG": "theirs"}
COMPILED = """
import torch
import autocastfx.runtime.operators.casts
saturate = torch.compile(lambda x: torch.ops.autocastfx.saturating_cast(x, torch.float16, 8192.0) + 0)
print(saturate(torch.tensor([1e9])).item())
"""


def printed(code: str, package: Path, **variables: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], cwd=package.parent, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the package in which one operator's number is another."""
    copied = tmp_path / "autocastfx"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    source = copied / "runtime/operators/casts.py"
    text, line = source.read_text(encoding="utf-8"), "    clamped = x.clamp(-bound, bound)\n"
    assert line in text
    source.write_text(text.replace(line, line.replace("bound)", "bound / 2)")), encoding="utf-8")
    return copied


def test_the_tag_is_that_of_the_source(other: Path) -> None:
    mine = f"autocastfx-{operators._digest()}"
    assert mine in torch.compiler.config.cache_key_tag
    assert re.fullmatch(f"theirs (?!{mine})autocastfx-[0-9a-f]+", printed(TAG, other, **THEIRS))


@pytest.mark.slow
def test_what_is_compiled_is_that_of_the_source(other: Path, tmp_path: Path) -> None:
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert [printed(COMPILED, package, **kept) for package in (PACKAGE, other)] == ["8192.0", "4096.0"]
