"""The code of docs/trainers.md runs, and prints what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.readme import outputs, run

for package in ("accelerate", "lightning", "peft"):
    pytest.importorskip(package, reason=f"needs {package}: make integrations")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_the_code_prints_what_is_shown(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    printed, shown = run(text, tmp_path), list(outputs(text))
    assert len(shown) == text.count("```text\n") > 0
    assert {code.start: output.text for code, output in shown} == {
        start: said for start, said in printed.items() if said
    }
