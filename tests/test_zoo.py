"""A few models of the zoo, as `python -m benchmarks.zoo` measures all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import autocastfx
from benchmarks import zoo
from benchmarks.zoo_hand import HAND
from benchmarks.zoo_measure import FIRST_SIZE, Row, measure
from benchmarks.zoo_models import ZOO

MODELS = {model.name: model for model in (*ZOO, *HAND)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bert-eager", "float16"), ("gpt2", "bfloat16"), ("llama", "bfloat16"), ("resnet", "bfloat16")],
)
@pytest.mark.filterwarnings("ignore:.*hundreds of times slower")  # what convert says of float16 convolutions on a CPU
def test_distance_to_float32_is_that_of_autocast(name: str, dtype: str) -> None:
    rows: list[Row] = []
    measure(MODELS[name], [dtype], rows.append)
    assert [row.mode for row in rows] == ["train", "eval"]
    assert [row.verdict for row in rows] == ["PASS", "PASS"], [row.reason for row in rows]


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
    measure(MODELS[name], [dtype], rows.append)
    assert [row.verdict for row in rows] == ["PASS", "PASS"], [row.reason for row in rows]


@pytest.mark.parametrize("name", [case.name for case in HAND if case.refused])
def test_cases_to_be_refused_pass_only_with_their_own_error(name: str) -> None:
    def verdicts(refused: str) -> list[tuple[str, str]]:
        rows: list[Row] = []
        measure(replace(MODELS[name], refused=refused), ["bfloat16"], rows.append)
        return [(row.capture, row.verdict) for row in rows]

    assert verdicts(MODELS[name].refused) == [("refused", "PASS")] * 2
    assert verdicts("another error") == [("refused", "FAIL")] * 2


def test_what_is_to_be_refused_fails_where_it_is_converted() -> None:
    rows: list[Row] = []
    measure(replace(MODELS["float-island"], refused="no islands"), ["bfloat16"], rows.append)
    assert [(row.verdict, row.reason) for row in rows] == [("FAIL", "is to be refused: no islands")] * 2


def test_the_zoo_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def fake(model: zoo.ZooModel, dtypes: list[str], report: object) -> None:
        measured.append(model.name)
        for dtype in dtypes:
            report(Row(model.name, "train", dtype))  # type: ignore[operator]

    monkeypatch.setattr(zoo, "measure", fake)
    path = tmp_path / "rows.json"
    for names in ("gru", "lstm,gru", "lstm"):
        assert zoo.main(["--models", names, "--dtypes", "float16", "--json", str(path)]) == 0
    assert measured == ["gru", "lstm"]
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["lstm", "gru"]
    assert zoo.main(["--models", "gru", "--dtypes", "float16", "--json", str(path), "--again"]) == 0
    assert measured == ["gru", "lstm", "gru"]
    path.write_text(path.read_text().replace(torch.__version__, "1.0"))
    assert zoo.main(["--models", "lstm", "--dtypes", "float16", "--json", str(path)]) == 0
    assert measured[3:] == ["lstm"]
    assert "1 models, 1 rows: 1 pass" in capsys.readouterr().out


def test_the_zoo_is_as_large_as_it_says() -> None:
    classes = {model.build.args[0] for model in ZOO}  # type: ignore[attr-defined]
    kinds = {getattr(transformers, name).config_class.model_type for name in classes}
    assert len(kinds) >= 60
    assert len(HAND) >= 40
    assert len(MODELS) == len(ZOO) + len(HAND)


@pytest.mark.parametrize("name", ["distilbert", "phi3", "vit"])
def test_every_op_is_listed(name: str) -> None:
    model = MODELS[name]
    inputs = model.inputs(*FIRST_SIZE)
    amp_model = autocastfx.convert(model.build(), (), inputs, dtype=torch.bfloat16)
    assert [variant.plan.unlisted for variant in amp_model.variants] == [{}, {}]
