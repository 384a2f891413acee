"""Scripts written for float32 train to float32's accuracy under ``autocastfx run``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def result(script: str, seed: int, *runner: str) -> float:
    """The last line that a script prints."""
    command = [sys.executable, *runner, str(SCRIPTS / f"{script}.py"), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"^result: (\S+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(("script", "models"), [("digits_cnn", 1), ("text_transformer", 1), ("digits_gan", 2)])
def test_a_script_trains_to_the_accuracy_of_float32(script: str, models: int, tmp_path: Path) -> None:
    """Means over seeds differ by less than float32's own results spread."""
    seeds = range(3)
    exact = [result(script, seed) for seed in seeds]
    report = tmp_path / "report.json"
    ours = [result(script, seed, "-m", "autocastfx", "run", "--report", str(report)) for seed in seeds]
    spread = max(exact) - min(exact)
    assert abs(sum(ours) - sum(exact)) / len(seeds) <= spread
    told: dict[str, Any] = json.loads(report.read_text())
    assert [len(model["skipped"]) for model in told["models"]] == [0] * models
    assert all(any(graph["low"] > 3 for graph in model["graphs"]) for model in told["models"])
    assert told["left"] == []
    assert told["steps"] > 100
