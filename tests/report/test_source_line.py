"""Stack traces as capture keeps them."""

from __future__ import annotations

from pathlib import Path

import torch

import autocastfx
from autocastfx.report.source_line import SourceLine, source_line

TORCH, OWN = Path(torch.__file__).parent, Path(autocastfx.__file__).parent


def trace(*frames: tuple[str, int, str]) -> str:
    return "\n".join(f'  File "{file}", line {number}, in forward\n    {code}' for file, number, code in frames)


def test_the_innermost_line_of_the_model_is_found() -> None:
    inside = (str(TORCH / "nn/modules/linear.py"), 134, "return F.linear(input, self.weight, self.bias)")
    outside = (str(OWN / "capture/export.py"), 78, "result = self.module(*args, **kwargs)")
    model, layer = ("/home/me/net/model.py", 7, "x = self.layer(x)"), ("/home/me/net/layer.py", 9, "return self.fc(x)")
    assert source_line(trace(outside, model, layer, inside)) == SourceLine("net/layer.py", 9, "return self.fc(x)")


def test_a_frame_without_code_has_an_empty_line() -> None:
    assert source_line('File "a/b.py", line 3, in f\n') == SourceLine("a/b.py", 3, "")


def test_paths_are_short_on_every_system() -> None:
    assert source_line(trace((r"C:\me\net\model.py", 1, "x"))) == SourceLine("net/model.py", 1, "x")
    assert source_line(trace(("/model.py", 1, "x"))) == SourceLine("model.py", 1, "x")
    assert source_line(trace(("<stdin>", 1, "x"))) == SourceLine("<stdin>", 1, "x")


def test_nothing_is_known_without_a_frame_of_the_model() -> None:
    assert source_line("") is None
    assert source_line(trace((str(TORCH / "functional.py"), 1, "pass"))) is None
