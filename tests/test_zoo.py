"""A few models of the zoo, as `python -m benchmarks.zoo` measures all of them."""

from __future__ import annotations

import pytest
import torch

import autocastfx
from benchmarks.zoo_measure import FIRST_SIZE, Row, measure
from benchmarks.zoo_models import ZOO

MODELS = {model.name: model for model in ZOO}


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


@pytest.mark.parametrize("name", ["distilbert", "phi3", "vit"])
def test_every_op_is_listed(name: str) -> None:
    model = MODELS[name]
    inputs = model.inputs(*FIRST_SIZE)
    amp_model = autocastfx.convert(model.build(), (), inputs, dtype=torch.bfloat16)
    assert [variant.plan.unlisted for variant in amp_model.variants] == [{}, {}]
