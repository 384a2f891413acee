"""The benchmark of losses tells what follows float32 from what does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from benchmarks import losses, report
from benchmarks.losses import AUTOCAST, CONTROL, DEFAULT, FASTEST, FLOAT32, Run
from benchmarks.models.followed import FOLLOWED, STEPS


def _runs(side: str, *offsets: float, model: str = "m") -> list[Run]:
    return [Run(model, side, seed, [2.0 + offset] * 40) for seed, offset in enumerate(offsets)]


def test_what_is_farther_than_autocast_beyond_its_own_spread_is_missed() -> None:
    exact, autocast = _runs(FLOAT32, 0, 0, 0), _runs(AUTOCAST, 0.1, -0.2, 0.1)
    near, far = _runs(DEFAULT, -0.1, -0.2, 0.15), _runs(FASTEST, 0.2, 0.4, 0.2)
    found = losses.rows([*exact, *autocast, *near, *far])
    assert [row.side for row in found] == [AUTOCAST, DEFAULT, FASTEST]
    assert found[0].distances == pytest.approx([0.1, 0.2, 0.1])
    assert found[1].to_autocast == pytest.approx([1, 1, 1.5])
    assert found[1].ends == pytest.approx([-0.1, -0.2, 0.15])
    assert losses.spread(found) == pytest.approx(math.log(2) / math.sqrt(3))  # of 0, log 2 and 0
    limit = math.exp(2 * math.log(2) / math.sqrt(3) * math.sqrt(2 / 3))
    assert limit == pytest.approx(1.92, abs=0.01)
    (near_told, is_near), (far_told, is_far) = losses.targets(found)
    assert is_near
    assert not is_far
    assert near_told.startswith(f"{DEFAULT}: 1.14 times {AUTOCAST}'s distance")
    assert far_told.endswith("(2.00 to 2.00), at most 1.92")
    assert f"MISSED   {FASTEST}" in losses.table([*exact, *autocast, *far])


def test_losses_that_are_not_finite_are_far_and_equal_ones_count_as_rounded() -> None:
    exact, autocast = _runs(FLOAT32, 0, 0), _runs(AUTOCAST, 0.1, 0.2)
    broken = [replace(run, losses=[*run.losses[:-1], math.nan]) for run in _runs(DEFAULT, 0, 0)]
    (told, reached), *_ = losses.targets(losses.rows([*exact, *autocast, *broken]))
    assert not reached
    assert "inf times" in told
    found = losses.rows([*exact, *autocast, *_runs(DEFAULT, 0, 0)])
    assert found[-1].distances == [1e-6] * 2
    assert losses.targets(found)[0][1]
    assert losses.targets(losses.rows([*exact[:1], *autocast[:1], *_runs(DEFAULT, 0)])) == [], "no spread"
    assert losses.rows([*autocast, *_runs(CONTROL, 0.1, 0.1)]) == [], "nothing to follow"


def test_the_results_that_are_kept_are_whole_and_the_default_follows_float32() -> None:
    runs = [Run(**row) for row in json.loads((report.RESULTS / "losses-cpu.json").read_text())["rows"]]
    expected = {(name, side, seed) for name in FOLLOWED for side in losses.SIDES for seed in range(losses.SEEDS)}
    assert {(run.model, run.side, run.seed) for run in runs} == expected
    assert all(len(run.losses) == STEPS for run in runs)
    reached = {told.split(":")[0]: reached for told, reached in losses.targets(losses.rows(runs))}
    assert reached.keys() == set(losses.OURS)
    assert reached[DEFAULT]
