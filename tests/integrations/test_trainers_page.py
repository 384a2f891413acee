"""The code of docs/integrations.md on trainers runs, and prints what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_steps import WAYS, go
from tests.golden.readme import outputs

for package in ("accelerate", "lightning", "peft"):
    pytest.importorskip(package, reason=f"needs {package}: make integrations")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_the_code_prints_what_is_shown(tmp_path: Path) -> None:
    ((_, text),) = pages = WAYS["practitioner"]()
    assert len(list(outputs(text))) == text.count("```text\n") > 0
    assert go(pages, tmp_path).differing == ()
