"""The benchmark of losses runs, at tiny sizes, and tells what follows float32 from what does not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import UnsupportedError
from benchmarks import losses, losses_tasks, report
from benchmarks.accuracy_tasks import DigitsCNN
from benchmarks.losses import AUTOCAST, CONTROL, DEFAULT, FASTEST, FLOAT32, HALF, MASTERS, Run
from benchmarks.losses_tasks import FOLLOWED, Images
from benchmarks.models import FullModel
from benchmarks.training import Setting, training

BFLOAT16 = Setting("cpu", torch.bfloat16)


class Perceptron(nn.Module):
    """Its loss, and logits of the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 * 32 * 32, 8), nn.Linear(8, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.second(self.first(pixel_values.flatten(1)).relu())
        return nn.functional.cross_entropy(logits, labels), logits


def _tiny(rate: float = 0.0, steps: int = 3) -> Images:
    return Images(DigitsCNN(steps=steps, batch=4, rate=rate), Perceptron)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(losses, "FOLLOWED", {"tiny": _tiny(1e-3)})
    threads = torch.get_num_threads()
    yield "tiny"
    torch.set_num_threads(threads)


def test_all_sides_begin_with_the_same_weights_and_see_the_same_batches(tiny: str) -> None:
    found = {side: losses.follow(tiny, _tiny(), side, 1, BFLOAT16).losses for side in losses.SIDES}
    exact = found[FLOAT32]
    assert len(set(exact)) == 3, "each batch has its loss"
    for side, mine in found.items():  # logits below 1: two roundings of weights and one of what is between
        assert mine == pytest.approx(exact, abs=4 * 2**-8), side
        assert (mine == exact) == (side == FLOAT32), side
    assert found[AUTOCAST] == found[DEFAULT]
    assert found[HALF] == found[MASTERS], "nothing has been learned"
    assert losses.follow(tiny, _tiny(), FLOAT32, 1, BFLOAT16).losses == exact
    assert losses.follow(tiny, _tiny(), FLOAT32, 2, BFLOAT16).losses != exact


def test_float16_losses_are_scaled(tiny: str) -> None:
    followed, setting = _tiny(1e-3, steps=12), Setting("cpu", torch.float16)
    sides = (AUTOCAST, DEFAULT, FASTEST, MASTERS)
    scaled, default, fastest, masters = (losses.follow(tiny, followed, side, 0, setting).losses for side in sides)
    still = losses.follow(tiny, _tiny(steps=12), AUTOCAST, 0, setting).losses
    assert masters[1] == still[1], "float16 gradients of weights overflow at the first scale: a step is skipped"
    assert masters[-1] < still[-1] - 0.05
    assert scaled[1] != still[1]
    for mine in (default, fastest):
        assert mine == pytest.approx(scaled, abs=0.001), "roundings of logits below 1"


def test_losses_are_those_of_an_ordinary_loop(tiny: str) -> None:
    followed = _tiny(1e-2, steps=12)
    model = followed.model(0).build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    expected = []
    for step, batch in enumerate(followed.batches(0)):
        optimizer.param_groups[0]["lr"] = followed.task.rate_at(step)
        loss, _ = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = losses.follow(tiny, followed, FLOAT32, 0, BFLOAT16).losses
    assert found == pytest.approx(expected, abs=10**-losses.DIGITS)
    still = losses.follow(tiny, _tiny(0.0, steps=12), FLOAT32, 0, BFLOAT16).losses
    assert max(abs(a - b) for a, b in zip(found, still, strict=True)) > 0.1, "it has learned"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_masters_are_those_of_one_step(dtype: torch.dtype) -> None:
    full = FullModel(Perceptron, lambda: {"pixel_values": torch.ones(2, 3, 32, 32), "labels": torch.tensor([0, 1])})
    made = training(HALF, full, Setting("cpu", dtype), has_masters=True)
    master = made.optimizer.param_groups[0]["params"][0]
    for _ in range(2):
        made.forward_and_backward()
        made.step()
        assert master.dtype == torch.float32
        assert master.grad is None, "or it would be added to"


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_recorded_is_the_loss_that_the_model_is_trained_by(name: str) -> None:
    pytest.importorskip("sklearn")
    followed = FOLLOWED[name]
    full = followed.model(0)
    batch = full.inputs()
    with torch.no_grad():
        loss, logits = full.build()(**batch)[:2]
    assert followed.loss(logits, batch["labels"]).item() == pytest.approx(loss.item(), rel=1e-6)
    assert followed.task.steps == losses_tasks.STEPS == 200
    again = [next(followed.batches(seed)) for seed in (0, 0, 1)]
    assert all(torch.equal(again[0][key], again[1][key]) for key in batch)
    assert not all(torch.equal(again[0][key], again[2][key]) for key in batch)


def test_runs_are_resumed_and_say_what_is_missing(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--seeds", "2", "--json", str(path)]
    status = losses.main(arguments)
    told = capsys.readouterr()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["side"], row["seed"]) for row in rows] == [(s, seed) for seed in range(2) for s in losses.SIDES]
    assert len(told.err.splitlines()) == len(rows)
    assert all(side in told.out for side in losses.SIDES)
    assert status == ("MISSED" in told.out)
    monkeypatch.setattr(losses, "follow", lambda *_: pytest.fail("trained again"))
    losses.main(arguments)
    assert capsys.readouterr().out == told.out

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError("not built.\nMore.")

    monkeypatch.undo()
    monkeypatch.setattr(autocastfx, "convert", refuse)
    run = losses.follow(tiny, _tiny(), FASTEST, 0, BFLOAT16)
    assert run.note == "not there yet: not built."
    assert f"tiny, {FASTEST}: not there yet: not built." in losses.table([run])
    for wrong in (["--seeds", "1"], ["--models", "none"]):
        with pytest.raises(SystemExit):
            losses.main(wrong)


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
    assert all(len(run.losses) == losses_tasks.STEPS for run in runs)
    reached = {told.split(":")[0]: reached for told, reached in losses.targets(losses.rows(runs))}
    assert reached.keys() == set(losses.OURS)
    assert reached[DEFAULT]
