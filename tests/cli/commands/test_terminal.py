"""The width and the colours of a command's output, on a terminal and in a pipe or a file."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from autocastfx.cli.main import main
from tests.cli.run_command import run

DUMP = ("dump", "torch.nn:TransformerEncoderLayer(16, 2)", "--inputs", "float32[4,3,16]", "--mode", "eval")
COLOURS = re.compile(r"\033\[\d+m")


class Terminal(io.StringIO):
    """A terminal that keeps what it shows."""

    def isatty(self) -> bool:
        return True


def shown(*argv: str) -> str:
    """What a command prints on a terminal."""
    with contextlib.redirect_stdout(Terminal()) as terminal:
        assert main(argv) == 0
    return terminal.getvalue()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def widest(text: str) -> int:
    return max(map(len, COLOURS.sub("", text).splitlines()))


def test_a_terminal_gets_its_width_and_colours() -> None:
    out = shown(*DUMP)
    assert widest(out) <= 70
    assert " \033[32mlow\033[0m " in out
    assert " \033[33mfloat32\033[0m " in out
    assert "\033[32m+\033[0m " in shown(*DUMP, "--full", "--only", "linear")
    assert shown(*DUMP, "--width", "70") == out
    assert widest(shown(*DUMP, "--width", "0")) > 70


def test_colours_change_no_character(capsys: pytest.CaptureFixture[str]) -> None:
    assert COLOURS.sub("", shown(*DUMP)) == run(capsys, *DUMP, "--width", "70")[1]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = shown(*DUMP)
    monkeypatch.setenv(name, value)
    assert shown(*DUMP) == COLOURS.sub("", coloured) != coloured


def test_an_empty_no_color_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert "\033[" in shown(*DUMP)


def test_a_terminal_that_is_too_narrow_gets_the_least_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    assert widest(shown(*DUMP, "--only", "low")) == 40


def test_a_file_gets_neither(tmp_path: Path) -> None:
    assert shown(*DUMP, "-o", str(tmp_path / "model.txt")) == ""
    text = (tmp_path / "model.txt").read_text(encoding="utf-8")
    assert "\033" not in text
    assert "…" not in text
    assert widest(text) > 70


def test_a_pipe_gets_neither(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *DUMP)[1]
    assert "\033" not in out
    assert "…" not in out
    assert widest(out) > 70
