"""The code of docs/integrations.md on trainers runs, and prints what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.readme import INTEGRATIONS, outputs, run, section

for package in ("accelerate", "lightning", "peft"):
    pytest.importorskip(package, reason=f"needs {package}: make integrations")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_the_code_prints_what_is_shown(tmp_path: Path) -> None:
    text = section(INTEGRATIONS.read_text(encoding="utf-8"), "Trainers")
    printed, shown = run(text, tmp_path), list(outputs(text))
    assert len(shown) == text.count("```text\n") > 0
    assert {code.start: output.text for code, output in shown} == {
        start: said for start, said in printed.items() if said
    }
