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
from benchmarks.tune_training import STEPS
from benchmarks.tune_training_table import DEFAULT, FLOAT32, TUNED, Run
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
