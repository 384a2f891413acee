"""A shell completes commands and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autocastfx du", ["dump"]),
        ("autocastfx lists ", ["show", "check", "path", "diff"]),
        ("autocastfx dump --dtype b", ["bfloat16"]),
        ("autocastfx dump --su", ["--summary"]),
    ],
)
def test_what_is_begun_is_completed(line: str, expected: list[str], tmp_path: Path) -> None:
    found = tmp_path / "found"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "autocastfx"], env=environment, check=True, capture_output=True)
    words = [word.strip() for word in found.read_text().split("\v")]
    assert [word for word in words if not word.startswith("-") or line.endswith("--su")] == expected
