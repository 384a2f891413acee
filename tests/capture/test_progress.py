"""Long work is told on a terminal while it lasts, and by the logger when it is done."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.capture.progress import stage
from tests.helpers import heard


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_line_that_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stage("thinking"):
        assert terminal.getvalue() == "\r\x1b[Kautocastfx: thinking …\r"
    assert terminal.getvalue().endswith("\r\r\x1b[K")


def test_a_terminal_that_knows_no_codes_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with stage("thinking"):
        pass
    assert terminal.getvalue() == ""


def test_elsewhere_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("thinking"):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_erases_the_line_and_logs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with heard() as lines, pytest.raises(KeyError), stage("thinking"):
        raise KeyError
    assert terminal.getvalue().endswith("\x1b[K")
    assert lines == []


@pytest.mark.usefixtures("both_modes")
def test_a_conversion_tells_its_captures() -> None:
    with heard() as lines:
        autocastfx.convert(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), dtype=torch.bfloat16)
    told = [line.partition(":")[0] for line in lines]
    converting = "converting 5 nodes for cpu"
    assert told == [
        *("capturing Sequential in train mode", converting),
        *("capturing Sequential in eval mode", converting),
        "compared with the model",
    ]
