"""A model that cannot be captured: one error, with the line and without torch's own hundreds of lines."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes

import autocastfx
from autocastfx.errors import CaptureError
from tests.helpers import Function


def _branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _sizes(x: Tensor) -> Tensor:
    return x @ torch.zeros(5, 2)


CASES: list[tuple[Callable[[Tensor], Any], str]] = [
    (
        _branch,
        r"test_failure\.py:\d+: return x if x\.sum\(\) > 0 else -x, called with args=\(float32\[3, 4\],\)\n"
        r"Its control flow .* with autocastfx\.enable",
    ),
    (
        _sizes,
        r"\[3, 4\] X \[5, 2\].*\nAt .*test_failure\.py:\d+: return x @ torch\.zeros\(5, 2\), called with "
        r"args=\(float32\[3, 4\],\)\nCall the model itself with these inputs: if that fails too",
    ),
]


@pytest.mark.parametrize(("function", "message"), CASES)
def test_says_the_line_and_nothing_else(
    function: Callable[[Tensor], Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loggers, said = (symbolic_shapes.log, fake_tensor.log), BufferingHandler(10_000)
    for log in loggers:
        log.addHandler(said)
    try:
        with pytest.raises(CaptureError, match=message) as caught:
            autocastfx.convert(Function(function), (torch.randn(3, 4),), dtype="float16")
    finally:
        for log in loggers:
            log.removeHandler(said)
    assert [record for record in said.buffer if record.levelno >= logging.WARNING] == []
    assert "".join(capfd.readouterr()) == ""
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1
    assert "torch/export" not in shown
    assert isinstance(caught.value.__context__, RuntimeError), "torch's own error, for whoever looks for it"


def test_the_innermost_module_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(9, 2)))
    with pytest.raises(CaptureError, match=r"\nIn module '1\.1' \(Linear\), called with input=float32\[3, 4\]\n"):
        autocastfx.convert(model, torch.randn(3, 4), dtype="float16")


def test_other_messages_of_the_loggers_pass() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append

    def warns(x: Tensor) -> Tensor:
        symbolic_shapes.log.warning("something else")
        return x + 1

    symbolic_shapes.log.addHandler(handler)
    try:
        autocastfx.convert(Function(warns), (torch.randn(3, 4),), dtype="float16")
        symbolic_shapes.log.warning("Unable to find user code: after a capture all pass")
    finally:
        symbolic_shapes.log.removeHandler(handler)
    assert {record.msg.split(":")[0] for record in records} == {"something else", "Unable to find user code"}
