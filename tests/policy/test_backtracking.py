"""Expressions that may take hours are refused, where they stand; those that people write for module paths are not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from autocastfx.errors import OpListError
from autocastfx.policy.rule import may_backtrack
from tests.helpers import op_list

SLOW = [r"(a+)+$", r"(.+\.)*x", r"(a|aa)+x", r"(a?a?)*x", r"(?:(?:x+)*y)?", r"(x+x+)+y", r"(?=(a+)+$)b", r"(?i)(A+a)*b"]
FAST = [
    *(r"(\w+\.)*attn", r"([^.]+\.)+fc", r"((attn|mlp)\.)*x", r"(?:\d{2}\.)*", r"(?i)(\w+\.)*head"),
    *(r"layers\.\d+\.(q|k)_proj", r".*\.\d+", r"(?!.*head).*", r"(a|b)*", r"h\.(1[0-9]|2)\.mlp"),
]


@pytest.mark.parametrize("expression", SLOW)
def test_a_repetition_of_what_matches_in_several_ways_is_refused_with_its_line(expression: str, tmp_path: Path) -> None:
    text = f"modules:\n  - path: 're:{expression}'\n    category: low\n"
    words = rf"test\.yaml:2:\d+: '{re.escape(expression)}' repeats what matches in several ways"
    with pytest.raises(OpListError, match=words):
        op_list(tmp_path, text)


@pytest.mark.parametrize("expression", FAST)
def test_others_are_taken_and_are_fast(expression: str) -> None:
    assert not may_backtrack(expression)
    started = time.perf_counter()
    for unit in ("a", "a.", "layers.1.", "x"):
        re.fullmatch(expression, unit * 200 + "!")
    assert time.perf_counter() - started < 2  # the others take longer than the age of the universe
