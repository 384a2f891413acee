"""``autocastfx lint``, driven as a person would."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autocastfx
from tests.cli.run_command import run

MODELS = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(64, 100), nn.GELU(), nn.Linear(100, 8))
"""
INPUTS = ("--inputs", "float32[32,64]")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "lint_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("lint_models", None)


def test_lint_prints_what_lint_returns(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(64, 100), nn.GELU(), nn.Linear(100, 8))
    amp_model = autocastfx.convert(model, torch.ones(32, 64), dtype=torch.bfloat16, device="cuda", check=False)
    code, out, err = run(capsys, "lint", "lint_models:net", *INPUTS, "--dtype", "bfloat16")
    assert (code, out, err) == (0, f"{autocastfx.lint(amp_model)}\n", "")
    code, out, _ = run(capsys, "lint", "lint_models:net", *INPUTS, "--gpu", "h100", "--json")
    data = json.loads(out)
    assert (code, data["gpu"]["name"], data["low"]) == (0, "H100", "float16")
    assert [(odd["operand"], odd["name"], odd["size"]) for odd in data["odd_sizes"]] == [
        ("0.weight", "N", 100),
        ("2.weight", "K", 100),
    ]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    {
        "no inputs": (["lint", "lint_models:net"], 2, "lint reads sizes: give --inputs."),
        "an unknown GPU": (["lint", "lint_models:net", *INPUTS, "--gpu", "H10"], 2, "'H10' (did you mean 'H100'?)."),
        "a dtype that the GPU lacks": (
            ["lint", "lint_models:net", *INPUTS, "--gpu", "V100", "--dtype", "bfloat16"],
            2,
            "of V100 take float16, not bfloat16",
        ),
        "sizes that do not fit": (["lint", "lint_models:net", "--inputs", "float32[2,3]"], 3, "Sequential fails: "),
        "no such model": (["lint", "lint_models:nett", *INPUTS], 2, "did you mean 'net'?"),
    }.values(),
)
def test_what_is_wrong_is_a_few_lines(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    found, out, err = run(capsys, *argv)
    assert (found, out) == (code, "")
    assert err.startswith("autocastfx: error: ")
    assert said in err
    assert len(err.splitlines()) <= 3


def test_the_pages_name_the_command() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    assert "`autocastfx lint MODEL" in (docs / "command-line.md").read_text(encoding="utf-8")
    for gpu in ("V100", "A100", "A100-80GB", "H100"):
        assert f"`{gpu}`" in (docs / "when-to-use.md").read_text(encoding="utf-8")
