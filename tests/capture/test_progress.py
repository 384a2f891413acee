"""Long work is told on a terminal while it lasts, and by the logger when it is done."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.capture.progress import counted, parts, stage
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


def test_a_conversion_tells_its_captures() -> None:
    with heard() as lines:
        autocastfx.convert(nn.Sequential(nn.Linear(16, 16)), torch.randn(2, 16), dtype=torch.bfloat16)
    told = [line.partition(":")[0] for line in lines]
    assert told[0] == "capturing Sequential in train mode"
    assert set(told[1:-2]) == {"converting 5 nodes for cpu"}
    assert told[-2:] == ["compared with the model", "converted Sequential in " + lines[-1].split()[3] + " s"]
    assert re.fullmatch(r"converted Sequential in \d+\.\d s: capture \d+\.\d, passes \d+\.\d, check \d+\.\d", lines[-1])


def test_a_conversion_without_inputs_tells_its_capture_at_the_first_call() -> None:
    with heard() as lines:
        amp_model = autocastfx.convert(nn.Linear(16, 16).eval(), dtype=torch.bfloat16)
    assert [re.match(r"prepared Linear in \d+\.\d s", line) is not None for line in lines] == [True]
    with heard() as lines:
        amp_model(torch.randn(2, 16))
    assert [line.partition(":")[0] for line in lines] == ["capturing Linear in eval mode", "converting 5 nodes for cpu"]


def test_parts_add_up_and_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.5, 2.5, 3.0, 4.0, 4.0, 5.0, 6.0, 9.0])  # as they are asked for
    monkeypatch.setattr("autocastfx.capture.progress.time.perf_counter", lambda: next(times))
    with heard() as lines, parts("made Net"):
        with stage("one", "first"), stage("inside", "second", is_logged=False):  # 1.0 to 3.0
            pass
        with stage("two", "first"):  # 4.0 to 4.0
            pass
        with stage("no part"):
            pass
    assert lines[0] == "one: 2.0 s"
    assert lines[-1].startswith("made Net in ")
    assert lines[-1].endswith(": first 2.0")


def test_a_failure_is_told_by_nobody() -> None:
    with heard() as lines, pytest.raises(KeyError), parts("made Net"), stage("one", "first"):
        raise KeyError
    assert lines == []


class Tee:
    def write(self, text: str) -> None: ...
    def flush(self) -> None: ...


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Tee(), _closed()], ids=["none", "a tee", "closed"])
def test_without_a_standard_error_nothing_is_shown(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with stage("thinking"), counted(None, "counting") as show:
        show(1)


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_a_capture_in_the_middle_of_a_run_is_shown_and_a_long_one_is_in_the_log(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, batches = Terminal(), [torch.ones(2, 4), torch.ones(2, 3, 4)]
    if way == "convert":
        model: nn.Module = autocastfx.convert(nn.Sequential(nn.Linear(4, 4)), batches[0], check=False)
        model(batches[0])
    else:
        model = autocastfx.enable(nn.Sequential(nn.Linear(4, 4)))
        model(batches[0])
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with heard(level=logging.WARNING) as lines:
        model(batches[1])
        assert "autocastfx: capturing Sequential …" in terminal.getvalue()
        assert lines == []
        monkeypatch.setattr("autocastfx.capture.progress._LONG", 0.0)
        model(batches[1])
        model(torch.ones(4))
    (line,) = lines
    assert re.match("captured Sequential again, which took [0-9]+ s: (it does not hold that|no graph fits)", line)
