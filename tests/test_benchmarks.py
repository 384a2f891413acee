"""The benchmarks of placement and of training run, at tiny sizes, and count what is there."""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.runtime.operators import cross_entropy_loss
from benchmarks import (
    accuracy,
    conversion,
    conversion_zoo,
    first_dump,
    host_time,
    memory_per_parameter,
    optimizer_step,
    placement,
    report,
    short_attention,
    vocabulary,
    watch,
)
from benchmarks.accuracy_tasks import TASKS, CharacterGPT, DigitsCNN, DigitsViT, Underflow
from benchmarks.graphs import SHAPES
from benchmarks.models import FullModel, ResNet50
from tests.helpers import TORCH


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_have_the_size_asked_for_and_something_to_place(shape: str) -> None:
    SHAPES[shape](50).lint()
    assert 60 <= len(SHAPES[shape](60).nodes) < 90
    row = conversion.measure(shape, 60)
    assert 0 < row.low < row.nodes
    assert row.passes > row.classify + row.place


def test_conversion_writes_its_rows_and_fails_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    assert conversion.main(["--sizes", "40,60", "--shapes", "unet", "--json", str(path)]) == 0
    assert [row["shape"] for row in json.loads(path.read_text())["rows"]] == ["unet", "unet"]
    monkeypatch.setattr(conversion, "SIZES", (60,))
    monkeypatch.setattr(conversion, "LIMITS", {"place": 5.0, "passes": 0.0})
    assert conversion.main(["--sizes", "60", "--shapes", "unet"]) == 1


def test_both_limits_of_conversion_hold_for_the_last_size() -> None:
    small, large = (conversion.Row("unet", nodes, 0.4, 5.1, 10.2, 7) for nodes in (3000, 10004))
    assert conversion.failures([small, large]) == [
        "unet: 10004 nodes placed in 5.1 s, the limit is 5 s",
        "unet: 10004 nodes converted in 10.2 s, the limit is 10 s",
    ]
    assert conversion.failures([replace(large, place=4.9, passes=9.9)]) == []


def test_passes_are_timed_beside_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversion_zoo, "REPEATS", 1)
    monkeypatch.setattr(conversion_zoo, "LIMIT", math.inf)  # of times, and the machine may be busy
    path = tmp_path / "rows.json"
    arguments = ["--models", "tied-weights,branch-on-value", "--json", str(path)]
    assert conversion_zoo.main(arguments) == 0
    rows = [conversion_zoo.Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert [(row.model, row.mode) for row in rows] == [("tied-weights", "train"), ("tied-weights", "eval")]
    assert all(0 < row.passes < row.capture and 0 < row.share < 1 for row in rows)
    assert {row.slowest for row in rows} <= {"recompose", "classify", "place", "insert casts", "verify", "compile"}
    assert "2 rows of 1 models" in capsys.readouterr().out
    monkeypatch.setattr(conversion_zoo, "measure", lambda *_: None)
    assert conversion_zoo.main(arguments) == 0, "what is held is not measured again"
    assert [conversion_zoo.Row(**row) for row in json.loads(path.read_text())["rows"]] == rows


def test_passes_that_take_long_beside_the_capture_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = conversion_zoo.Row("good", "train", 100, 1.0, 0.5, "verify", 0.4)
    bad, worse = replace(good, model="bad", passes=0.51), replace(good, model="worse", passes=2.0)
    assert conversion_zoo.failures([good, bad, worse]) == [worse, bad]
    lines = conversion_zoo.table([good, bad, worse], shown=1).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["worse", "bad"], "what fails is shown in any case"
    assert lines[-1] == "3 rows of 3 models: ratio 0.51 in the median, 2.00 at most; above 0.5: 2"
    for rows, status in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(conversion_zoo, "measure_all", lambda _, rows=rows: iter([rows]))
        assert conversion_zoo.main(["--models", "bert"]) == status
    assert "verify 40 %" in capsys.readouterr().out


def test_resnet50_has_its_known_number_of_parameters() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet50().parameters()) == 25_557_032


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> FullModel:
    inputs = {"pixel_values": torch.empty(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    model = FullModel(lambda: ResNet50((1, 1), 8, 10), lambda: {k: v.to("meta") for k, v in inputs.items()})
    monkeypatch.setattr(placement, "MODELS", {"tiny": model})
    return model


def test_casts_of_parameters_and_of_the_rest_are_counted_apart(tiny: FullModel) -> None:
    row = placement.measure("tiny", tiny, "default, fold=exact")
    modules = [m for m in ResNet50((1, 1), 8, 10).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    weights = [parameter for module in modules for parameter in module.parameters()]
    assert row.parameter_casts == len(weights)
    assert row.parameter_bytes == 6 * sum(weight.numel() for weight in weights)
    image = 2 * 3 * 32 * 32
    assert (row.activation_casts, row.activation_bytes) == (1, 6 * image), "the loss reads the 16-bit logits"


def test_what_is_made_of_parameters_alone_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.softmax(-1).mT

    model = FullModel(Scaled, lambda: {"x": torch.ones(3, 8)})
    row = placement.measure("scaled", model, "default, fold=exact")
    assert (row.parameter_casts, row.parameter_bytes, row.activation_bytes) == (1, 6 * 64, 6 * 3 * 8)


def test_ratios_are_to_the_first_policy_and_what_is_missing_says_so(
    tiny: FullModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = {"one": {}, "two": {"op_list": ["default"]}, "three": {"op_list": "no_such_preset"}}
    monkeypatch.setattr(placement, "POLICIES", policies)
    monkeypatch.setattr(placement, "AUTOCAST", "one")
    path = tmp_path / "rows.json"
    assert placement.main(["--models", "tiny", "--json", str(path)]) == 0
    assert [row["ratio"] for row in json.loads(path.read_text())["rows"]] == [1.0, 1.0, None]
    assert "not there yet: no preset is named 'no_such_preset'" in capsys.readouterr().out


# ---- a step of the optimizer ----------------------------------------------------------------------------------------


@pytest.fixture
def _no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted models of other tests, if they are not collected yet, look at each optimizer's step."""
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())


@pytest.mark.usefixtures("_no_other_model")
@pytest.mark.parametrize("optimizer", optimizer_step.OPTIMIZERS)
def test_a_step_reads_and_runs_no_more_for_more_parameters(optimizer: str) -> None:
    if optimizer == "Adagrad fused" and TORCH < (2, 13):
        pytest.skip("before torch 2.13 it takes no scale")
    small, large = ({row.side: row for row in optimizer_step.measure(optimizer, n, rounds=6)} for n in (3, 40))
    ours, theirs, bare = (large[name] for name in optimizer_step.SIDES)
    assert ours.host_reads - bare.host_reads == (0 if "fused" in optimizer else 1)
    assert bare.aten_calls < ours.aten_calls < theirs.aten_calls
    assert small[ours.side].package_frames == ours.package_frames > 0
    assert theirs.package_frames == bare.package_frames == 0
    assert theirs.ratio == 1
    assert bare.ratio > 0


def test_frames_of_a_generator_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "PACKAGE", __file__)
    assert optimizer_step.count_frames(lambda: None) == 1
    assert optimizer_step.count_frames(lambda: list(i for i in range(5)) and None) == 1 + 6  # noqa: C400


def test_what_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = optimizer_step.measure("SGD", 2, rounds=6)
    ours = replace(rows[0], ratio=0.9)
    assert optimizer_step.failures([ours, *rows[1:]]) == []
    wrong = replace(ours, ratio=1.2, host_reads=2, package_frames=ours.package_frames + 1, parameters=3)
    bare = replace(rows[2], parameters=3)
    time, reads, frames = optimizer_step.failures([ours, *rows[1:], wrong, bare])
    assert "1.200 times" in time
    assert "2 host reads more" in reads
    assert "frames" in frames
    monkeypatch.setattr(optimizer_step, "LIMIT", 0.0)
    path = tmp_path / "rows.json"
    assert optimizer_step.main(["--optimizers", "SGD", "--sizes", "2", "--rounds", "6", "--json", str(path)]) == 1
    assert [row["side"] for row in json.loads(path.read_text())["rows"]] == list(optimizer_step.SIDES)


# ---- memory of a parameter ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_bytes_of_a_parameter(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    other = torch.eye(3).to_sparse()
    assert memory_per_parameter.main(["--width", "128", "--json", str(path)]) == 0
    assert other.is_sparse  # what else lives in the process is left out, whatever it is
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    kinds = ("weights", "gradients", "masters", "state", "working", "total")
    known = {
        "float32": (4, 4, 0, 8, 0, 16),
        "torch.autocast float16, GradScaler": (4, 4, 0, 8, 0, 16),
        "float16 cast": (4, 4, 0, 8, 0, 16),
        "float16 cached": (4, 4, 0, 8, 2, 18),
        "float16 model.half(), masters": (2, 4, 4, 8, 0, 18),
        "float16 low, inference": (2, 0, 0, 0, 0, 2),
    }
    assert rows.keys() == known.keys()
    for mode, sizes in known.items():  # inputs, the scale and the optimizer's step counters are some more
        assert [rows[mode][kind] for kind in kinds] == pytest.approx(sizes, abs=0.05), mode
    assert rows["float16 cast"]["optimizer_peak"] == pytest.approx(0, abs=0.05)
    wide = 2 + 2 / memory_per_parameter.DEPTH  # 16-bit gradients become float32 ones, one after the other
    assert rows["float16 model.half(), masters"]["optimizer_peak"] == pytest.approx(wide, abs=0.05)


# ---- accuracy -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("sklearn")
    tasks = {
        "digits CNN": DigitsCNN(steps=3, batch=4, rate=1e-3),
        "digits ViT": DigitsViT(steps=3, batch=4, rate=1e-3),
        "character GPT": CharacterGPT(steps=3, batch=2, rate=1e-3, context=8, validation=64),
    }
    assert tasks.keys() | {"underflow"} == TASKS.keys()
    monkeypatch.setattr(accuracy, "TASKS", tasks)
    monkeypatch.setattr(DigitsCNN, "seeds", 1)
    monkeypatch.setattr(DigitsViT, "seeds", 1)
    monkeypatch.setattr(CharacterGPT, "seeds", 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("tiny_tasks")
def test_every_task_trains_and_what_is_held_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    modes = ["float32", "bfloat16 cast", "bfloat16 cached", "float16 model.half()"]
    arguments = ["--tasks", ",".join(accuracy.TASKS), "--modes", ",".join(modes), "--json", str(path)]
    accuracy.main(arguments)
    runs = accuracy.read(path)
    assert [(run.task, run.mode) for run in runs] == [(task, mode) for task in accuracy.TASKS for mode in modes]
    assert [row["difference"] for row in json.loads(path.read_text())["rows"] if row["mode"] == "float32"] == [0] * 3
    for task in accuracy.TASKS:
        cast, cached = (run.score for run in runs if run.task == task and run.mode in modes[1:3])
        assert cast == cached

    monkeypatch.setattr(accuracy, "train", lambda *_: pytest.fail("trained again"))
    accuracy.main(arguments)
    assert accuracy.read(path) == runs
    assert "character GPT" in capsys.readouterr().out
    others = {**accuracy.TASKS, "digits ViT": replace(accuracy.TASKS["digits ViT"], rate=2e-3)}
    monkeypatch.setattr(accuracy, "TASKS", others)
    monkeypatch.setattr(accuracy, "train", lambda name, task, mode, seed: replace(runs[0], task=name, mode=mode))
    accuracy.main(arguments)
    assert {run.task for run in accuracy.read(path) if run not in runs} == {"digits ViT"}


def test_a_model_that_underflows_learns_with_a_scaled_loss_alone() -> None:
    pytest.importorskip("sklearn")
    task = replace(TASKS["underflow"], steps=60)
    assert isinstance(task, Underflow)
    scores = {
        mode: accuracy.train("underflow", task, mode, 0).score
        for mode in ("float32", "float16 cast", accuracy.UNSCALED)
    }
    untrained = accuracy.train("underflow", replace(task, rate=0.0), "float16 cast", 0).score
    assert scores[accuracy.UNSCALED] == untrained < 30
    assert scores["float32"] > 80
    assert abs(scores["float16 cast"] - scores["float32"]) <= 1  # nine of the images


def test_a_mean_too_far_away_fails() -> None:
    def runs(mode: str, scores: list[float]) -> list[accuracy.Run]:
        protocol = TASKS["character GPT"].protocol
        return [accuracy.Run("character GPT", mode, seed, protocol, s, 0, 1.0) for seed, s in enumerate(scores)]

    float32 = runs("float32", [2.0, 2.1, 2.2])
    near, far = runs("bfloat16 cast", [2.02, 2.08, 2.2]), runs("float16 cast", [2.02, 2.12, 2.22])
    rows = accuracy.summary([*float32, *near, *far, *runs("float16 cached", [2.0])])
    assert [(row.mode, row.passed) for row in rows] == [
        ("float32", True),
        ("bfloat16 cast", True),
        ("float16 cast", False),
    ]
    assert rows[2].difference == pytest.approx(0.02)
    assert accuracy.failures(rows) == [rows[2]]
    assert accuracy.failures([replace(rows[0], mode=accuracy.UNSCALED)]) != [], "it has to be bad"


# ---- a loss over a vocabulary ----------------------------------------------------------------------------------------


def test_a_loss_over_a_vocabulary_is_timed_and_its_memory_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in {"_CLASSES": 32, "_PER_THREAD": 32, "_PARTS": 1}.items():
        monkeypatch.setattr(cross_entropy_loss, name, number)
    path = tmp_path / "rows.json"
    arguments = ["--classes", "16,32", "--positions", "4", "--rounds", "2", "--json", str(path)]
    threads = torch.get_num_threads()
    try:
        assert vocabulary.main(arguments) == 0
        shown = capsys.readouterr().out
        monkeypatch.setattr(vocabulary, "measure", lambda *_: pytest.fail("measured again"))
        assert vocabulary.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == shown
    rows = {(row["classes"], row["side"]): row for row in json.loads(path.read_text())["rows"]}
    assert all(row["ms"] > 0 for row in rows.values())
    loss, total = 4, 4
    for classes in (16, 32):  # the logarithms, and in backward their gradient and that of the logits
        autocast, half = rows[classes, vocabulary.AUTOCAST], rows[classes, vocabulary.HALF]
        assert autocast["kept"] == 4 * 4 * classes + loss + total
        assert autocast["peak"] >= 3 * 4 * 4 * classes
        assert half["kept"] == 2 * 4 * classes + loss // 2 + total // 2
    few, many = rows[16, vocabulary.DEFAULT], rows[32, vocabulary.DEFAULT]
    assert few["kept"] == rows[16, vocabulary.AUTOCAST]["kept"]
    assert many["kept"] == loss + total
    assert many["peak"] < 2 * 4 * 32 + 4 * 4 * 32, "less than the gradient and one float32 copy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--classes", "many"], "--classes: numbers separated by commas, not 'many'"),
        (["--positions", "0"], "--classes and --positions are at least 1"),
        (["--rounds", "1"], "--rounds: quartiles need two or more"),
    ],
)
def test_what_is_no_vocabulary_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        vocabulary.main(arguments)
    assert message in capsys.readouterr().err


# ---- attention of few tokens -----------------------------------------------------------------------------------------


def test_attention_of_few_tokens_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--tokens", "3,5", "--rounds", "2", "--json", str(path)]
    threads = torch.get_num_threads()
    try:
        status = short_attention.main(arguments)
        shown = capsys.readouterr().out
        monkeypatch.setattr(short_attention, "measure", lambda *_: pytest.fail("measured again"))
        assert short_attention.main(arguments) == status
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == shown
    rows = [short_attention.Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert [(row.tokens, row.is_causal) for row in rows] == [(3, False), (3, True), (5, False), (5, True)]
    assert status == any(row.to_torch[1] > 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "few"], "--tokens: numbers separated by commas, not 'few'"),
        (["--tokens", "0"], "--tokens are at least 1"),
        (["--rounds", "1"], "--rounds: quartiles need two or more"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        short_attention.main(arguments)
    assert message in capsys.readouterr().err


# ---- results that are kept -------------------------------------------------------------------------------------------


def test_the_results_that_are_kept_hold() -> None:
    runs = accuracy.read(report.RESULTS / "accuracy-cpu.json")
    rows = accuracy.summary(runs)
    assert {(row.task, row.mode) for row in rows} == {
        (task, mode) for task in TASKS for mode in accuracy.MODES if mode != accuracy.UNSCALED or task == "underflow"
    }
    assert accuracy.failures(rows) == []
    held = json.loads((report.RESULTS / "optimizer-step-cpu.json").read_text())["rows"]
    assert optimizer_step.failures([optimizer_step.Row(**row) for row in held]) == []


class Skips(nn.Module):
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = x if mask is None else x * mask
        return found if labels is None else found - labels


def test_the_plain_graph_takes_a_call_that_skips_an_argument() -> None:
    inputs = {"x": torch.randn(4), "labels": torch.randn(4)}
    amp_model = autocastfx.convert(Skips(), inputs, dtype="bfloat16")
    assert torch.equal(host_time._plain(amp_model, inputs)()[0], amp_model(**inputs))


def test_host_time_is_measured_and_held_against_its_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--models", "MLP 16 layers", "--rounds", "2", "--json", str(tmp_path / "rows.json")]
    host_time.main(arguments)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["side"] for row in rows] == list(host_time.SIDES)
    assert all(row["ms"] > 0 for row in rows)
    assert {row["side"]: list(row["to"]) for row in rows}[host_time.CACHED] == [host_time.DEFAULT, host_time.PLAIN]
    assert capsys.readouterr().out.count("MLP 16 layers") >= len(rows)
    for limit, status in ((0.0, 1), (1e9, 0)):  # the rows that are kept are not measured again
        monkeypatch.setattr(host_time, "LIMITS", [(one, other, limit) for one, other, _ in host_time.LIMITS])
        assert host_time.main(arguments) == status


@pytest.mark.parametrize(("limit", "status", "said"), [("1e9", 0, "reached"), ("0", 1, "MISSED")])
def test_a_first_dump_is_timed_and_shows_progress(
    limit: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_dump.main(["--layers", "1", "--limit", limit]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "shown: capturing BertForMaskedLM in train mode"
    assert lines[-1].startswith(said)


def test_what_a_watch_adds_is_measured_and_held_against_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = FullModel(host_time._MLP, lambda: {"x": torch.zeros(1, 16)})
    monkeypatch.setattr(watch, "SMALL", {"tiny": tiny})
    arguments = ["--models", "tiny", "--every", "10", "--rounds", "4", "--json", str(tmp_path / "rows.json")]
    watch.main(arguments)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["nodes"] > 32
    assert row["observed_ms"] > row["plain_ms"] > 0
    assert capsys.readouterr().out.startswith("model ")
    for limit, status in ((0.0, 1), (1e9, 0)):  # the row that is kept is not measured again
        monkeypatch.setattr(watch, "LIMIT", limit)
        assert watch.main(arguments) == status
    assert "tiny: a watched step takes " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        watch.main(["--models", "none"])
