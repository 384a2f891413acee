"""Code that torch.compile has on disk is not taken for another version of this package's operators."""

from __future__ import annotations

import os
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
COMPILED = """
import torch
from autocastfx.runtime.operators.casts import saturating_cast
print(torch.compile(lambda x: saturating_cast(x, torch.float16))(torch.tensor([1e9])).item())
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
    (source,) = (path for path in (copied / "runtime/operators").glob("*.py") if path.name == "casts.py")
    text = source.read_text(encoding="utf-8")
    assert "bound" in text
    source.write_text(text + "\n_ALTERED = 1\n", encoding="utf-8")
    return copied


def test_the_tag_is_that_of_the_source(other: Path) -> None:
    mine = torch.compiler.config.cache_key_tag
    assert f"autocastfx-{operators._digest()}" in mine
    assert printed(TAG, PACKAGE) != printed(TAG, other)
    assert printed(TAG, PACKAGE, TORCH_COMPILE_CACHE_KEY_TAG="theirs") == f"theirs {printed(TAG, PACKAGE)}"
