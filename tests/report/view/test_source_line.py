"""Stack traces as capture keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autocastfx
from autocastfx.report.view import SourceLine, source_line

TORCH, OWN = Path(torch.__file__).parent, Path(autocastfx.__file__).parent


def trace(*frames: tuple[str, int, str]) -> str:
    return "\n".join(f'  File "{file}", line {number}, in forward\n    {code}' for file, number, code in frames)


def test_the_innermost_line_of_the_model_is_found() -> None:
    inside = (str(TORCH / "nn/modules/linear.py"), 134, "return F.linear(input, self.weight, self.bias)")
    outside = (str(OWN / "capture/export.py"), 78, "result = self.module(*args, **kwargs)")
    model, layer = ("/home/me/net/model.py", 7, "x = self.layer(x)"), ("/home/me/net/layer.py", 9, "return self.fc(x)")
    assert source_line(trace(outside, model, layer, inside)) == SourceLine(
        "/home/me/net/layer.py", 9, "return self.fc(x)"
    )


def test_a_frame_without_code_has_an_empty_line() -> None:
    assert source_line('File "a/b.py", line 3, in f\n') == SourceLine("a/b.py", 3, "")


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/home/me/net/model.py", "net/model.py"),
        (r"C:\me\net\model.py", "net/model.py"),
        ("/model.py", "model.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_a_file_is_short_on_every_system(path: str, short: str) -> None:
    found = source_line(trace((path, 1, "x")))
    assert found is not None
    assert (found.path, found.file, str(found)) == (path, short, f"{path}:1: x")


def test_where_a_package_is_behind_a_link_either_path_is_its_own() -> None:
    for folder in (TORCH, TORCH.resolve()):
        frames = (
            ("/home/me/model.py", 7, "self.fc(x)"),
            (str(folder / "nn/modules/linear.py"), 134, "F.linear(input)"),
        )
        found = source_line(trace(*frames))
        assert found is not None
        assert found.path == "/home/me/model.py"


def test_nothing_is_known_without_a_frame_of_the_model() -> None:
    assert source_line("") is None
    assert source_line(trace((str(TORCH / "functional.py"), 1, "pass"))) is None
