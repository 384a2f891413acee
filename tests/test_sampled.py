"""tests/sampled.txt names tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SAMPLED

ROOT = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_a_sampled_test_is_there(name: str) -> None:
    file, function = name.split("::")
    assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
