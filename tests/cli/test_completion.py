"""A shell completes commands and options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autocastfx.cli.completion import WORDS, words_of
from autocastfx.cli.main import parser_of_all

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autocastfx du", ["dump"]),
        ("autocastfx lists ", ["show", "check", "path", "diff"]),
        ("autocastfx dump --dtype b", ["bfloat16"]),
        ("autocastfx dump --su", ["--summary"]),
        ("autocastfx dump net:Net --inputs 'float32[2]' --fold k", ["kernel"]),
        ("autocastfx lists show --dtype f", ["float16"]),
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
    command = [sys.executable, "-X", "importtime", "-m", "autocastfx"]
    imported = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stderr
    assert "argcomplete" in imported
    assert "torch" not in imported, "which takes seconds"
    words = [word.strip() for word in found.read_text().split("\v")]
    assert [word for word in words if not word.startswith("-") or line.endswith("--su")] == expected


def test_the_words_are_those_of_the_parsers() -> None:
    assert json.loads(WORDS.read_text(encoding="utf-8")) == words_of(parser_of_all()), "python -m tests.golden"
