"""Errors of transformers models are predicted; what is refused has its reason in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tune_zoo
from benchmarks.tune_zoo import PROBES, Row, table


@pytest.mark.usefixtures("threads_kept")
def test_an_error_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert tune_zoo.main(["--models", "distilbert", "--json", str(path)]) == 0
    (row,) = (Row(**row) for row in json.loads(path.read_text())["rows"])
    assert row.predicted == pytest.approx(row.true, rel=4 / (2 * PROBES) ** 0.5)
    assert 1e-3 < row.true < 1e-1
    assert capsys.readouterr().out == table([row]) + "\n"


@pytest.mark.usefixtures("threads_kept")
def test_what_cannot_be_measured_has_its_reason() -> None:
    (case,) = (case for case in tune_zoo.ZOO if case.name == "mixtral")
    assert tune_zoo.measure(case).refused.startswith("SensitivityError: the gradient cannot be differentiated again: ")


def test_the_table_counts_what_is_near() -> None:
    said = table([Row("a", 1.0, 1.0), Row("b", 0.6, 1.0, 2), Row("c", 1.5, 1.0), Row("d", refused="Error: no")])
    assert said.endswith("of the true error: 2 of 3 models; half of them within 0.80 to 1.25.")
    assert "d                   Error: no\n" in said
