"""A few models of the zoo, as `python -m benchmarks.zoo` measures all of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import zoo
from benchmarks.judge import Distance, Forward, distance, gradient_distances, gradient_scales, typical
from benchmarks.models.hand import HAND
from benchmarks.models.zoo import ZooModel
from benchmarks.report import RESULTS
from benchmarks.zoo import MODELS, Draw, Kept, Row, Run, as_on_cuda, counts, judge, measure, run
from tests.helpers import sampled

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "dtype", "folds"),
    [
        ("bert-eager", "float16", ["exact"]),
        ("gpt2", "bfloat16", ["exact", "kernel"]),
        *((name, "bfloat16", ["exact"]) for name in ("rms-norm-by-hand", "in-place-on-views")),
        *((name, "float16", ["exact"]) for name in ("whole-row-masked", "moving-average", "nested-inputs")),
    ],
)
def test_distance_to_float32_is_that_of_autocast(name: str, dtype: str, folds: list[str]) -> None:
    rows: list[Row] = []
    measure(MODELS[name], [(dtype, fold) for fold in folds], rows.append)
    assert [(row.fold, row.mode) for row in rows] == [(fold, mode) for fold in folds for mode in ("train", "eval")]
    assert {row.verdict for row in rows} == {"PASS"}, [row.reason for row in rows]


_AS_ON_CUDA = ("contrasted", "in-place-on-views")  # a size that the batch decides, and results that are written into


@pytest.mark.parametrize(
    "name", sampled([*_AS_ON_CUDA, *(c.name for c in HAND if c.name not in _AS_ON_CUDA)], lambda at, _: at < 2)
)
def test_what_only_cuda_changes_keeps_the_distance(name: str) -> None:
    """Padded products, masks, shared heads and float32 gradients of weights, of any size, on a CPU."""
    rows: list[Row] = []
    with as_on_cuda():
        measure(MODELS[name], [("bfloat16", "exact")], rows.append)
    assert {row.verdict for row in rows} <= {"PASS"}, [row.reason for row in rows]


@pytest.mark.parametrize("name", [case.name for case in HAND if case.refused])
def test_cases_to_be_refused_pass_only_with_their_own_error(name: str) -> None:
    def verdicts(refused: str) -> list[tuple[str, str]]:
        rows: list[Row] = []
        measure(replace(MODELS[name], refused=refused), [("bfloat16", "exact")], rows.append)
        return [(row.capture, row.verdict) for row in rows]

    assert verdicts(MODELS[name].refused) == [("refused", "PASS")] * 2
    assert verdicts("another error") == [("refused", "FAIL")] * 2


def test_what_is_to_be_refused_fails_where_it_is_converted() -> None:
    rows: list[Row] = []
    measure(replace(MODELS["float-island"], refused="no islands"), [("bfloat16", "exact")], rows.append)
    assert [(row.verdict, row.reason) for row in rows] == [("FAIL", "is to be refused: no islands")] * 2


def test_the_zoo_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, int]] = []

    def fake(model: ZooModel, cases: list[tuple[str, str]], report: Any, fuse: str) -> None:
        measured.append((model.name, len(cases)))
        for dtype, fold in cases:
            report(Row(model.name, "train", dtype, fold=fold))

    monkeypatch.setattr(zoo, "measure", fake)
    path = tmp_path / "rows.json"

    def command(names: str, *more: str, fold: str = "exact") -> int:
        return zoo.main(["--models", names, "--dtypes", "float16", "--fold", fold, "--json", str(path), *more])

    for names in ("gru", "lstm,gru", "lstm"):
        assert command(names) == 0
    assert measured == [("gru", 1), ("lstm", 1)]
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["lstm", "gru"]
    assert command("gru", "--again") == command("lstm", fold="exact,kernel") == 0
    assert measured[2:] == [("gru", 1), ("lstm", 2)], "with another level all of a model is measured"
    assert "1 models, 2 cases: 2 pass" in capsys.readouterr().out
    path.write_text(path.read_text().replace(torch.__version__, "1.0"))
    assert command("lstm") == 0
    assert measured[4:] == [("lstm", 1)], "by another torch"


def test_a_file_holds_a_row_for_each_model() -> None:
    far = Row(
        "a", "train", "float16", ours=3.0, autocast=2.0, grad_ours=1.0, grad_autocast=1.0, verdict="FAIL", reason="x"
    )
    near = Row("a", "eval", "float16", ours=6.0, autocast=1.0, fold="kernel", capture="refused", reason="x")
    found = zoo.kept([far, replace(far, dtype="bfloat16", ours=12.0), near])
    assert found.cases == [["float16", "exact"], ["bfloat16", "exact"], ["float16", "kernel"]]
    assert found.verdicts == {"FAIL": 2, "REFUSED": 1}
    assert found.ratios["exact"] == {"output": [3.0, 6.0], "gradients": [1.0, 1.0]}, "the mean and the worst"
    assert found.reasons == {"x": ["train float16 exact", "train bfloat16 exact", "eval float16 kernel"]}


def test_the_pages_count_the_cases_that_are_kept() -> None:
    kept = [Kept(**row) for row in json.loads((RESULTS / "zoo-cpu.json").read_text())["rows"]]
    assert [row.model for row in kept] == list(MODELS)
    found = counts(kept)
    assert found["FAIL"] == 0
    page = " ".join((ROOT / "docs" / "guarantees.md").read_text().split())
    refused, other = found["REFUSED"], found["UNEXPORTABLE"]
    assert f"| {found['PASS']:,} | could be measured: **none is farther" in page
    assert f"| {refused} | models that must be refused" in page
    assert f"| {other} | cannot be captured as one graph" in page
    assert f"So {refused + other} cases have no figure" in page
    assert f"in all {found['PASS']:,} measured cases" in (ROOT / "README.md").read_text()
    assert f"These are {found.total():,} cases" in page
    assert not any(re.search(r"[\s\"]/", reason) for row in kept for reason in row.reasons), "a folder of the machine"


def test_a_row_names_the_worst_output_and_the_worst_gradient() -> None:
    """A gradient that is small beside the others fails by itself, and so does a second output."""

    def forward(*outputs: float) -> Forward:
        return Forward({f"output[{i}]": torch.tensor([1.0, value]) for i, value in enumerate(outputs)}, (), ())

    def run(output: float, bias: float) -> Run:
        return Run(
            forward(0.0, output), forward(0.0), {"l.weight": torch.full((4096,), 9.0), "l.bias": torch.tensor([bias])}
        )

    owner = torch.nn.Module()
    owner.l = torch.nn.Linear(4096, 1)
    reference, eps = run(0.0, 10.0), torch.finfo(torch.bfloat16).eps

    def judged(output: float, bias: float, fold: str = "exact", count: int = 1) -> Row:
        row = Row("a", "train", "bfloat16", fold=fold)
        draws = [Draw(run(output, bias), run(eps, 10 + 10 * eps), reference)] * count
        return judge(row, draws, owner, torch.bfloat16)

    good = judged(2.1 * eps, 10 + 21 * eps)
    assert (good.verdict, good.output, good.tensor) == ("PASS", "output[1]", "l.bias")
    assert good.ours / good.autocast == pytest.approx(2.1)
    assert good.tensor_ours / good.tensor_autocast == pytest.approx(2.1, rel=0.01)
    assert judged(2.3 * eps, 10.0).reason.startswith("output[1]: distance 1.80e-02 against 7.81e-03")
    assert judged(0.0, 10 + 23 * eps).reason.startswith("gradient of l.bias: distance")
    assert judged(2.9 * eps, 10 + 105 * eps, "kernel").verdict == "PASS"
    assert judged(3.1 * eps, 10.0, "kernel").verdict == "FAIL"
    assert "gradient of l.bias" in judged(0.0, 10 + 115 * eps, "kernel").reason
    assert judged(2.1 * eps, 10.0, count=3).draws == 3


@pytest.mark.parametrize(
    ("ours", "typically"),
    [([2.0, 8.0], 4.0), ([1.0, 0.0], 1e-3), ([1.0, math.inf], math.inf), ([math.nan, 1.0], math.nan), ([0.0], 0.0)],
)
def test_a_distance_over_draws_is_the_geometric_mean(ours: list[float], typically: float) -> None:
    found = typical([Distance("a", one, 1.0) for one in ours])
    assert found.ours == pytest.approx(typically, nan_ok=True)
    assert found.autocast == 1.0


def test_what_fails_in_a_few_draws_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A true excess stays: ours is wrong in every draw, so all are made; a right one needs the first few alone."""
    counted: list[int] = []

    def judged(verdict: str, row: Row, draws: Sequence[Draw], *_: Any) -> Row:
        counted.append(len(draws))
        return replace(row, verdict=verdict)

    monkeypatch.setattr(zoo, "DRAWS", (1, 2, 4))
    for verdict, expected in (("PASS", [1, 1]), ("FAIL", [1, 2, 4] * 2)):
        monkeypatch.setattr(zoo, "judge", partial(judged, verdict))
        counted.clear()
        measure(MODELS["double-path"], [("bfloat16", "exact")], [].append)
        assert counted == expected


def test_a_loss_scale_is_halved_until_gradients_are_finite() -> None:
    """The gradient of a number times 60,000 leaves float16 with any scale above 1."""
    module = torch.nn.Linear(4, 1, dtype=torch.float32)
    steep = lambda x: (60_000 * module(x).half()).float()  # noqa: E731
    call = torch.nn.Module()
    call.forward = steep  # type: ignore[method-assign]
    model = ZooModel("steep", lambda: module, lambda batch, size: {"x": torch.ones(batch, 4) / 64})
    assert run(call, module, model, "train", scale=4096.0).scale <= 64
    assert run(call, module, model, "train").scale == 1.0


def test_a_gradient_whose_true_value_is_zero_is_judged_by_that_of_its_module() -> None:
    """Rounding noise of a bias before a norm is no error; the same bias would be one if it had a gradient."""
    torch.manual_seed(0)
    terms, x, eps = torch.randn(4096, 32), torch.randn(4096, 64), torch.finfo(torch.bfloat16).eps
    terms -= terms.mean(0)
    low = terms.bfloat16().float()

    def gradients(terms: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"net.layer.weight": terms.T @ x, "net.layer.bias": terms.sum(0), "net.head.bias": terms[0]}

    found, reference = gradients(low), gradients(terms)
    assert distance(found["net.layer.bias"], reference["net.layer.bias"]) > 1, "all of it is noise"
    assert max(gradient_distances(found, reference).values()) <= eps
    assert gradient_scales(reference)["net.head.bias"] == pytest.approx(float(terms[0].norm())), "of its own module"
    wrong = {**found, "net.layer.bias": found["net.layer.bias"] + 0.05 * reference["net.layer.weight"].abs().mean()}
    assert gradient_distances(wrong, reference)["net.layer.bias"] > 4 * eps
