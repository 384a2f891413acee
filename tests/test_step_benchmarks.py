"""The benchmarks of memory, of a training step and of inference count what is there, and say what is reached."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import compiled_step, inference, memory, report, step_table, timing, train_step, training
from benchmarks.memory import AUTOCAST, FLOAT32, HALF, KERNEL
from benchmarks.models.families import FullModel
from benchmarks.models.full import TRAINED
from benchmarks.models.small import SMALL

BATCH = 3
CACHED = "cached, fold=exact"
COMPILED = ("float32", "torch.autocast", "cast, fold=exact", "cast, fold=kernel", "pure half")


class Perceptron(nn.Module):
    """Its loss: linear, relu, dropout, linear, mean of squares."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 9), nn.Linear(9, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> tuple[Tensor]:
        found = self.second(self.dropout(self.first(pixel_values).relu()))
        return (found.float().square().mean(),)


def _inputs() -> dict[str, Tensor]:
    return {"pixel_values": torch.ones(BATCH, 8), "labels": torch.zeros(BATCH, dtype=torch.long)}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, threads_kept: None) -> str:
    models = {"tiny": FullModel(Perceptron, _inputs)}
    for module in (train_step, inference):
        monkeypatch.setattr(module, "SMALL", models)
    return "tiny"


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "activations"),
    [
        # what relu gives, and the loss's input; a 16-bit copy of the input is an input too
        (FLOAT32, 4 * BATCH * 9 + 4 * BATCH * 2),
        (AUTOCAST, 2 * BATCH * 9 + 4 * BATCH * 2),
        ("fold=exact", 2 * BATCH * 9 + 4 * BATCH * 2),
        (HALF, 2 * BATCH * 9 + 4 * BATCH * 2),
    ],
)
def test_saved_bytes_of_a_perceptron(policy: str, activations: int) -> None:
    row = memory.measure("tiny", FullModel(Perceptron, _inputs), policy)
    assert (row.activations, row.weights) == (activations, (4 if policy == FLOAT32 else 2) * 9 * 2)


def test_memory_fails_above_its_limits() -> None:
    def rows(kernel: int, model: str = "m") -> list[memory.Row]:
        sizes = {AUTOCAST: 1000, HALF: 800, KERNEL: kernel}
        return [memory.Row(model, policy, size) for policy, size in sizes.items()]

    assert memory.failures(rows(810)) == []
    mean, single = memory.failures(rows(830))
    assert mean.startswith("fold=kernel: 0.830 times torch_autocast_cuda in the geometric mean")
    assert single == "fold=kernel: m: 1.038 times half, the limit is 1.02"
    assert memory.failures(rows(750, "GPT-2 b8 s1024")) == [
        "fold=kernel: GPT-2 b8 s1024: 0.938 times half, the limit is 0.92"
    ]
    assert "fold=kernel to half: 1.012 in the geometric mean (m 1.01)" in memory.table(rows(810))
    assert memory.LIMITS.keys() < TRAINED.keys()


# ---- a training step ------------------------------------------------------------------------------------------------


def test_counts_and_times_of_a_training_step(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    sides = (training.FLOAT32, training.AUTOCAST, training.DEFAULT, CACHED, training.HALF)
    arguments = ["--rounds", "2", "--processes", "1", "--sides", "|".join(sides), "--json", str(path)]
    train_step.main(arguments)
    held = json.loads(path.read_text())
    assert held["sides"] == list(sides)
    rows = {row["side"]: step_table.Row(**row) for row in held["rows"]}
    assert list(rows) == list(sides)
    parameters = 8 * 9 + 9 + 9 * 2 + 2
    for side in (training.AUTOCAST, training.DEFAULT, CACHED):
        row = rows[side]
        assert (row.weight_casts, row.weight_bytes) == (row.gradient_casts, row.gradient_bytes) == (4, 6 * parameters)
        assert (row.activation_casts, row.activation_bytes) == (3, 6 * BATCH * (8 + 2 + 2))
        assert row.saved == 2 * BATCH * 9 + 4 * BATCH * 2
    half, autocast = rows[training.HALF], rows[training.AUTOCAST]
    assert half.weight_casts == half.gradient_casts == rows[training.FLOAT32].activation_casts == 0
    assert rows[training.FLOAT32].ops < autocast.ops
    assert rows[CACHED].ops == rows[training.DEFAULT].ops - 4 + 1, "one foreach copy for four casts"
    assert half.step_ops == autocast.step_ops > 0
    assert autocast.backward_to_autocast == autocast.step_to_autocast == half.backward_to_half == [1.0] * 3
    assert (half.backward_ms or 0) > 0
    monkeypatch.setattr(train_step, "measured", lambda *_: pytest.fail("measured again"))
    train_step.main(arguments)


def test_targets_are_told_with_their_figures() -> None:
    def row(side: str, **fields: Any) -> step_table.Row:
        ratios = {"backward_to_autocast": [1.0, 1.0, 1.0], "backward_to_half": [1.1] * 3, "step_to_autocast": [1.0] * 3}
        return step_table.Row("m", side, **{"parameters": 4, "ops": 100, "saved": 1000, **ratios, **fields})

    half = row(training.HALF, ops=90, activation_casts=2)
    autocast = row(training.AUTOCAST, activation_bytes=100)
    good = {"gradient_casts": 4, "ops": 95, "activation_casts": 8}
    fast = {"backward_to_autocast": [0.9] * 3, "backward_to_half": [1.04] * 3, "step_to_autocast": [0.97] * 3}
    default = row(training.DEFAULT, activation_bytes=70, weight_bytes=10)
    rows = [half, autocast, default, row(training.FASTEST, **good, **fast)]
    assert [told for told, reached in step_table.targets(rows) if not reached] == []
    worse = row(training.FASTEST, gradient_casts=5, ops=110, activation_casts=9, saved=1100)
    slow = row(training.DEFAULT, activation_bytes=81, backward_to_autocast=[1.0, 1.03, 1.1])
    told = step_table.targets([half, autocast, slow, worse])
    assert len(told) == 10
    assert not any(reached for _, reached in told)
    assert "activation casts beyond pure half's: 7 (m), at most 6" in told[0][0]
    assert "MISSED   cast, fold=exact: cast bytes" in step_table.table([half, autocast, slow, worse])
    alone = [autocast, row(training.FASTEST, **{**fast, "backward_to_half": []})]
    assert not any("pure half" in what for what, _ in step_table.targets(alone)), "not among the sides"


def test_each_side_is_first_as_often() -> None:
    taken = list(timing.turns("abc", 3))
    assert [name for _, name in taken[::3]] == ["a", "b", "c", "a"]
    assert [is_counted for is_counted, _ in taken] == [False] * 3 + [True] * 9
    assert timing.ratios([1.0, 4.0], [1.0, 2.0])[1] == 1.5
    assert timing.ratios([1.0], None) == []


# ---- results ---------------------------------------------------------------------------------------------


FLOAT8 = ("GPT-2 b8 s1024", "Llama 12x768 b8 s1024", "BERT-base b8 s512")


@pytest.mark.parametrize(
    ("name", "models", "kinds", "key"),
    [
        ("memory", TRAINED, memory.POLICIES.keys() - {memory.FLOAT8}, "policy"),
        ("memory-float8", FLOAT8, (memory.EXACT, memory.FLOAT8), "policy"),
        ("train-step-cpu", SMALL, training.SIDES, "side"),
        ("train-step-compiled-cpu", SMALL, COMPILED, "side"),
        ("inference-cpu", SMALL, inference.SIDES, "side"),
    ],
)
def test_the_results_that_are_kept_are_whole(name: str, models: Any, kinds: Any, key: str) -> None:
    held = json.loads((report.RESULTS / f"{name}.json").read_text())["rows"]
    assert {(row["model"], row[key]) for row in held} == set(itertools.product(models, kinds))


def test_the_readme_gives_the_figures_that_were_measured() -> None:
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    rows = json.loads((report.RESULTS / "train-step-cpu.json").read_text())["rows"]
    default, fastest = (
        [row["backward_to_autocast"][1] for row in rows if row["side"] == side]
        for side in (training.DEFAULT, training.FASTEST)
    )
    told = (
        f"| 1 | {geometric_mean(default):.2f} in the mean (range {min(default):.2f} to {max(default):.2f}); cached "
        f'weights and `fold="kernel"` {geometric_mean(fastest):.2f} ({min(fastest):.2f} to {max(fastest):.2f}) |'
    )
    assert told in readme
    counts = json.loads((report.RESULTS / "placement.json").read_text())["rows"]
    bert = {row["policy"]: row["activation_bytes"] for row in counts if row["model"] == "BERT-base"}
    share = [bert[policy] / bert["torch_autocast_cuda"] for policy in ("default, fold=exact", "default, fold=kernel")]
    assert f'| 1 | {share[0]:.2f}; `fold="kernel"` {share[1]:.2f} |' in readme


# ---- compiled -------------------------------------------------------------------------------------------------------


def _compiled(ratio: float, apart: float, returned: str = "all") -> compiled_step.Row:
    quartiles = [ratio - 0.1, ratio, ratio + 0.1]
    moved = (2_000_000, 1_500_000)
    by_process = [ratio / 1.01, ratio * 1.01]
    told = ["forward at x"]
    return compiled_step.Row("tiny", returned, 2.0, 2 * ratio, quartiles, 1e-3, apart, *moved, 1, told, by_process)


def test_a_compiled_step_is_judged_by_its_time_and_its_distance() -> None:
    fine = [_compiled(0.8, 1e-3), _compiled(1.2, 1.1e-3), _compiled(1.2, 1e-3, compiled_step.CONTROL)]
    assert compiled_step.missed(fine) == []
    assert "mean of the ratios, both sides torch.autocast: 1.2000 ± 0.0100" in compiled_step.table(fine)
    assert "2.0,     1.5  " in compiled_step.table(fine)
    assert "reached  geometric mean of the ratios, all returned: 0.9798 ± 0.0070" in compiled_step.table(fine)
    assert "not converted: tiny: forward at x" in compiled_step.table(fine)
    assert compiled_step.missed([_compiled(1.1, 2e-3)]) == [
        "the geometric mean, all returned, is 1.1000",
        "tiny: gradients are 2.00 times as far off",
    ]


def test_processes_that_disagree_make_the_mean_less_exact() -> None:
    row = _compiled(1.0, 1e-3)
    times = [{compiled_step.AUTOCAST: [2.0, 2.0], compiled_step.BACKEND: [2.0 * r, 2.0 * r]} for r in (0.9, 1.0, 1.1)]
    together = compiled_step._of_processes(row, times)
    assert together.by_process == [0.9, 1.0, 1.1]
    assert together.ratio[1] == 1.0
    ratio, error = compiled_step.means([together])["all"]
    assert ratio == pytest.approx((0.9 * 1.1) ** (1 / 3))
    assert error == pytest.approx(0.0579, abs=1e-4)  # the deviation of the logarithms over the root of 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted as Linux has them")
def test_memory_that_is_kept_has_no_page_faults() -> None:
    """In a process of its own, because the setting stays."""
    script = """
import resource, torch
from benchmarks.timing import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(4_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
given_back, is_kept, _, _, kept = faults(), keep_memory(), faults(), faults(), faults()
print(given_back, is_kept, kept)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found[1] == "True"
    assert int(found[2]) <= int(found[0]) // 10
