"""Triton's kernels run on a CPU by its interpreter: ``make kernels``."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def interpreter() -> None:
    if not IS_INTERPRETED:
        pytest.skip("needs the package triton and TRITON_INTERPRET=1: make kernels")


@pytest.fixture(scope="session")
def compiler() -> None:
    if not HAS_TRITON:
        pytest.skip("needs the package triton: make kernels")
