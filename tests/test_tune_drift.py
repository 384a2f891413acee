"""The benchmark of tuned plans in the course of training follows each plan through all stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tune_drift, tune_training
from benchmarks.tune_drift import Row, table
from tests.tiny_case import TINY


@pytest.mark.usefixtures("threads_kept")
def test_each_plan_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_drift, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(tune_drift, "AFTER", (1, 2))
    monkeypatch.setattr(tune_drift, "STAGES", (0, 2, 3))
    monkeypatch.setattr(tune_training, "STEPS", 3)
    path = tmp_path / "rows.json"
    for _ in range(2):
        assert tune_drift.main(["--models", "tiny", "--json", str(path)]) == 0
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert [(row.after, len(row.errors)) for row in rows] == [(1, 3), (2, 3)]
    assert all(error >= 0 for row in rows for error in row.errors)
    assert len({error for row in rows for error in row.errors}) > 1 or rows[0].bytes == 1


def test_the_largest_error_of_each_time_is_told() -> None:
    rows = [Row("a", "bfloat16", 40, 0.8, [1.0] * 7), Row("a", "bfloat16", 250, 0.9, [0.5] * 7)]
    rows += [Row("b", "bfloat16", 40, 0.7, [1.0] * 6 + [1.9]), Row("b", "bfloat16", 250, 0.9, [1.1] + [0.5] * 6)]
    assert table(rows).splitlines()[-2:] == [
        "Tuned after 40 steps: at most 1.90 times the default list's error.",
        "Tuned after 250 steps: at most 1.10 times the default list's error.",
    ]


def test_a_model_that_is_unknown_is_told_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune_drift.main(["--models", "gpt9"])
    assert "unknown: gpt9; there are char GPT" in capsys.readouterr().err
