"""The cost of a measurement is measured, and does not grow with depth as a training step's does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tune_cost


@pytest.mark.usefixtures("threads_kept")
def test_a_deep_model_takes_less_memory_than_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_cost, "BATCHES", 1)
    monkeypatch.setattr(tune_cost, "EVALUATIONS", 1)
    path = tmp_path / "rows.json"
    assert tune_cost.main(["--widths", "64", "--layers", "2", "6", "--json", str(path)]) == 0
    shallow, deep = [tune_cost.Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert deep.memory < 1.5 < shallow.memory <= tune_cost.MOST_MEMORY
    assert 0 < deep.products <= tune_cost.MOST_EVALUATIONS
    out = capsys.readouterr().out
    assert out == tune_cost.table([shallow, deep]) + "\n"
    assert "times the memory of a training step: 2." in out


def test_costs_are_counted_apart() -> None:
    costs = [tune_cost.Cost(50, 51, 2), tune_cost.Cost(51, 50, 3), tune_cost.Cost(9, 99, 3.1)]
    said = tune_cost.Cost.within(costs)
    assert said == (
        "At most 50 gradient evaluations: 2 of 3 by products, 1 by time. "
        "At most 3 times the memory of a training step: 2."
    )
