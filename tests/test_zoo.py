"""A few models of the zoo, as `python -m benchmarks.zoo` measures all of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autocastfx
from benchmarks import zoo, zoo_measure
from benchmarks.gradient_scale import gradient_distances, gradient_scales
from benchmarks.report import RESULTS
from benchmarks.zoo_case import ZooModel
from benchmarks.zoo_hand import HAND
from benchmarks.zoo_judge import Distance, Forward, distance, typical
from benchmarks.zoo_measure import FIRST_SIZE, Draw, Row, Run, judge, measure, run
from benchmarks.zoo_models import ZOO

ROOT = Path(__file__).resolve().parents[1]
MODELS = {model.name: model for model in (*ZOO, *HAND)}


@pytest.mark.parametrize(
    ("name", "dtype", "folds"),
    [
        ("bert-eager", "float16", ["exact"]),
        pytest.param("bert", "bfloat16", ["kernel"], marks=pytest.mark.slow),
        ("gpt2", "bfloat16", ["exact", "kernel"]),
        pytest.param("llama", "bfloat16", ["exact"], marks=pytest.mark.slow),
        ("resnet", "bfloat16", ["exact"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*hundreds of times slower")  # what convert says of float16 convolutions on a CPU
def test_distance_to_float32_is_that_of_autocast(name: str, dtype: str, folds: list[str]) -> None:
    rows: list[Row] = []
    measure(MODELS[name], [(dtype, fold) for fold in folds], rows.append)
    assert sorted((row.fold, row.mode) for row in rows) == [
        (fold, mode) for fold in folds for mode in ("eval", "train")
    ]
    assert {row.verdict for row in rows} == {"PASS"}, [row.reason for row in rows]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("whole-row-masked", "float16"),
        ("rms-norm-by-hand", "bfloat16"),
        ("in-place-on-views", "bfloat16"),
        ("moving-average", "float16"),
        ("unlisted-custom-op", "float16"),
        ("double-path", "bfloat16"),
        ("loop-over-length", "bfloat16"),
        ("nested-inputs", "float16"),
    ],
)
def test_hard_cases_pass(name: str, dtype: str) -> None:
    rows: list[Row] = []
    measure(MODELS[name], [(dtype, "exact")], rows.append)
    assert [row.verdict for row in rows] == ["PASS", "PASS"], [row.reason for row in rows]


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
    measured: list[str] = []

    def fake(model: zoo.ZooModel, cases: list[tuple[str, str]], report: object) -> None:
        measured.append(model.name)
        for dtype, fold in cases:
            report(Row(model.name, "train", dtype, fold=fold))  # type: ignore[operator]

    monkeypatch.setattr(zoo, "measure", fake)
    path = tmp_path / "rows.json"
    for names in ("gru", "lstm,gru", "lstm"):
        assert zoo.main(["--models", names, "--dtypes", "float16", "--fold", "exact", "--json", str(path)]) == 0
    assert measured == ["gru", "lstm"]
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["lstm", "gru"]
    assert zoo.main(["--models", "gru", "--dtypes", "float16", "--fold", "exact", "--json", str(path), "--again"]) == 0
    assert measured == ["gru", "lstm", "gru"]
    path.write_text(path.read_text().replace(torch.__version__, "1.0"))
    assert zoo.main(["--models", "lstm", "--dtypes", "float16", "--fold", "exact", "--json", str(path)]) == 0
    assert measured[3:] == ["lstm"]
    assert "1 models, 1 rows: 1 pass" in capsys.readouterr().out
    assert zoo.main(["--models", "lstm", "--dtypes", "float16", "--json", str(path)]) == 0, (
        "the other level is measured"
    )
    assert measured[4:] == ["lstm"]
    assert {row["fold"] for row in json.loads(path.read_text())["rows"]} == {"exact", "kernel"}


def test_the_pages_count_the_rows_that_are_kept() -> None:
    kept = [Row(**row) for row in json.loads((RESULTS / "zoo-cpu.json").read_text())["rows"]]
    assert {row.model for row in kept} == set(MODELS)
    assert "FAIL" not in {row.verdict for row in kept}
    refused, other = (sum(row.capture == kind for row in kept) for kind in ("refused", "-"))
    counts = (
        f"{len(kept) - refused - other:,} were measured, {refused} are models that must be refused, and {other} cannot"
    )
    page = " ".join((ROOT / "docs" / "guarantees.md").read_text().split())
    assert counts in page
    measured = len(kept) - refused - other
    assert f"{measured:,} of {measured:,} cases" in (ROOT / "README.md").read_text()
    assert f"none of {len(kept):,} rows is" in page
    assert not any(re.search(r"[\s\"]/", row.reason) for row in kept), "no row names a folder of the machine"


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
    counts: list[int] = []
    unchanged = zoo_measure.judge

    def judged(row: Row, draws: Sequence[Draw], *rest: Any) -> Row:
        counts.append(len(draws))
        wrong = replace(
            draws[0].ours.first,
            outputs={"output": torch.full_like(next(iter(draws[0].ours.first.outputs.values())), 9.0)},
        )
        return unchanged(
            row, [replace(d, ours=replace(d.ours, first=wrong)) for d in draws] if is_wrong else draws, *rest
        )

    monkeypatch.setattr(zoo_measure, "judge", judged)
    for is_wrong, expected in ((False, [8, 8]), (True, [8, 16, 32, 64] * 2)):
        counts.clear()
        rows: list[Row] = []
        measure(MODELS["double-path"], [("bfloat16", "exact")], rows.append)
        assert counts == expected
        assert {row.verdict for row in rows} == {"FAIL" if is_wrong else "PASS"}


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


def test_the_zoo_is_as_large_as_it_says() -> None:
    classes = {model.build.args[0] for model in ZOO}  # type: ignore[attr-defined]
    kinds = {getattr(transformers, name).config_class.model_type for name in classes}
    assert len(kinds) >= 60
    assert len(HAND) >= 40
    assert len(MODELS) == len(ZOO) + len(HAND)


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("name", ["distilbert", "phi3", "vit"])
def test_every_op_is_listed(name: str) -> None:
    model = MODELS[name]
    inputs = model.inputs(*FIRST_SIZE)
    amp_model = autocastfx.convert(model.build(), (), inputs, dtype=torch.bfloat16)
    assert [variant.plan.unlisted for variant in amp_model.variants] == [{}, {}]
