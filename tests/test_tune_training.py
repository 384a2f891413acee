"""The benchmark of training by tuned plans runs, at tiny sizes, and tells what is as close from what is not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import tune_training
from benchmarks.tune_models import MODELS
from benchmarks.tune_training import DEFAULT, FLOAT32, ROUNDED, STEPS, TUNED, Run, reached, rows, table
from tests.tiny_case import TINY, batches


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(tune_training, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(tune_training, "STEPS", 4)
    threads = torch.get_num_threads()
    yield "tiny"
    torch.set_num_threads(threads)


def _refuse(*what: object) -> None:
    pytest.fail(f"trained again: {what}")


def test_each_run_is_stored_once(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.json"
    arguments = ["--models", tiny, "--seeds", "2", "--json", str(path)]
    assert tune_training.main(arguments) == 1, "three models are needed"
    runs = [Run(**row) for row in json.loads(path.read_text())["rows"]]
    assert len(runs) == len({(run.dtype, run.side, run.seed) for run in runs}) == 2 + 2 * 2 * 3
    losses = {(run.dtype, run.side, run.seed): run.loss for run in runs}
    for (_, side, seed), loss in losses.items():
        exact = losses[FLOAT32, FLOAT32, seed]
        assert loss == pytest.approx(exact, rel=0.01), "the same weights and batches"
        if side != TUNED:  # in a model as small as this, float32 itself may move the fewest bytes
            assert (loss == exact) == (side == FLOAT32)
    assert losses[FLOAT32, FLOAT32, 0] != losses[FLOAT32, FLOAT32, 1]
    assert all((run.bytes > 0) == (run.side in (DEFAULT, TUNED)) for run in runs)
    assert [len(part) for part in next(tune_training.batches(tune_training.MODELS[tiny], 3))] == [32, 32]
    monkeypatch.setattr(tune_training, "train", _refuse)
    assert tune_training.main(arguments) == 1


def _runs(model: str, dtype: str, default: list[float], tuned: list[float], share: float = 0.5) -> Iterator[Run]:
    """Runs at these distances from float32, whose losses are those of the seeds."""
    for seed, (d, t) in enumerate(zip(default, tuned, strict=True)):
        exact = 1.0 + seed
        yield Run(model, FLOAT32, FLOAT32, seed, exact)
        yield Run(model, dtype, ROUNDED, seed, exact)
        yield Run(model, dtype, DEFAULT, seed, exact + d, bytes=1000)
        yield Run(model, dtype, TUNED, seed, exact - t, bytes=round(1000 * share))


CLOSE = ([0.01, 0.02, 0.03], [0.02, 0.01, 0.03])
FAR = ([0.01, 0.02, 0.03], [0.03, 0.04, 0.06])


def _all(bfloat16: list[tuple[list[float], list[float]]], share: float = 0.5) -> list[Run]:
    kinds = {"float16": [CLOSE] * 3, "bfloat16": bfloat16}
    each = [(str(i), dtype, *one) for dtype, sides in kinds.items() for i, one in enumerate(sides)]
    return [run for model, dtype, d, t in each for run in _runs(model, dtype, d, t, share)]


def test_distances_on_either_side_of_float32_are_alike() -> None:
    (row,) = rows(list(_runs("a", "float16", *FAR)))
    assert row.default == pytest.approx(FAR[0])
    assert row.tuned == pytest.approx(FAR[1])
    assert row.bytes == 0.5


def test_the_line_is_reached_if_both_dtypes_are_as_close_with_fewer_bytes() -> None:
    assert reached(rows(_all([CLOSE] * 3)))
    assert "fewer bytes, in both dtypes: reached." in table(_all([CLOSE] * 3))
    assert not reached(rows(_all([CLOSE] * 2))), "three models"
    assert not reached(rows([run for run in _all([CLOSE] * 3) if run.dtype != "bfloat16"])), "both dtypes"
    assert not reached(rows(_all([CLOSE] * 3, share=1.0)))
    assert "nothing to gain" in table(_all([CLOSE] * 3, share=1.0))
    assert not reached([])


def test_seeds_without_a_skipped_step_are_told_beside() -> None:
    runs = list(_runs("a", "float16", [0.01, 0.02, 0.5], [0.02, 0.03, 0.01]))
    skipped = [replace(run, skipped=int(run.side == DEFAULT and run.seed == 2)) for run in runs]
    assert "not judged" not in table(runs)
    mean = (0.01 / 0.015 + 0.01 / 0.015) / 2
    assert f"the 2 seeds in which neither side skipped a step: the same is {mean:+.2f}, standard error 0.00" in table(
        skipped
    )
    assert rows(skipped)[0].differences == rows(runs)[0].differences


def test_what_is_less_close_is_told() -> None:
    shown = table(_all([FAR] * 3))
    assert shown.count("LESS CLOSE") == 3
    assert "MISSED   bfloat16" in shown
    assert "reached  float16" in shown
    assert shown.endswith("in both dtypes: MISSED.")
    assert not reached(rows(_all([FAR, FAR, CLOSE])))
    nan = ([0.01, 0.02, 0.03], [0.01, float("nan"), 0.01])
    assert not reached(rows(_all([CLOSE, CLOSE, nan])))
    assert table(_all([CLOSE, CLOSE, nan])).count("LESS CLOSE") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--models", "none"], "unknown: none"), (["--seeds", "1"], "--seeds: a standard error needs two or more")],
)
def test_what_cannot_be_trained_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tune_training.main(arguments)
    assert message in capsys.readouterr().err


def test_batches_that_end_early_are_an_error(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(TINY, batches=lambda seed: itertools.islice(batches(seed), 3))
    monkeypatch.setattr(tune_training, "MODELS", {tiny: short})
    with pytest.raises(ValueError, match="the batches of seed 0 end after 3 steps of 4"):
        tune_training.train(tiny, FLOAT32, FLOAT32, 0)


@pytest.mark.parametrize("name", tune_training.CHOSEN)
def test_models_have_batches_for_all_steps(name: str) -> None:
    assert sum(1 for _ in itertools.islice(tune_training.batches(MODELS[name], 0), STEPS)) == STEPS
