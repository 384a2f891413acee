"""The effect of float8 on each product of a node is that of a run of this product alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.numerics.compare import TargetDistance
from autocastfx.plan.sensitivity import rms
from autocastfx.policy.float8 import Product
from tests.numerics.test_float8_search import BATCHES, LOW, OPTIONS, loss, mixing


def one_product(path: str, op: str, product: Product) -> OpList:
    modules = [{"path": path, "ops": [op], "float8": {"products": [product.value]}}]
    rest = [{"ops": ["linear", "addmm"], "products": []}]
    return OpList.of({"extends": "bfloat16", "float8": rest, "modules": modules})


def test_each_product_is_predicted() -> None:
    model = mixing()
    found = autocastfx.sensitivity(model, BATCHES[:2], loss, float8=True, probes=16, **OPTIONS)
    judge = TargetDistance(model, BATCHES[:2], loss, "gradient", None)
    base = judge(autocastfx.convert(model, BATCHES[0], dtype=LOW, check=False), LOW)
    nodes = {"linear_2": ("up", "linear"), "addmm": ("re:^$", "addmm"), "linear_3": ("head", "linear")}
    for name, (path, op) in nodes.items():
        effect = found[name]
        assert set(effect.products) == {product.value for product in Product}
        for product in Product:
            amp_model = autocastfx.convert(
                model, BATCHES[0], dtype=LOW, op_list=one_product(path, op, product), check=False
            )
            true = math.sqrt(max(0.0, judge(amp_model, LOW) ** 2 - base**2))
            assert rms(effect.products[product.value]) == pytest.approx(true, rel=0.5, abs=base / 2), (name, product)
    assert found["linear_2"].sizes == (32, 128, 64)
    assert found["addmm"].sizes == (32, 64, 128)
    assert found["linear_2"].flops == 2 * 32 * 128 * 64


def test_products_that_do_not_run_are_not_measured() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(16, 12))
    model[1].weight.requires_grad_(False)
    found = autocastfx.sensitivity(model, [torch.randn(8, 32)], loss, float8="rowwise_gw_hp", probes=2, **OPTIONS)
    assert set(found["linear"].products) == {"output"}  # no gradient of an input, and none of the weight in this recipe
    assert set(found["linear_1"].products) == {"output", "input_gradient"}
    assert found["linear_2"].products == {}  # 12 is no multiple of 16
    in_blocks = autocastfx.sensitivity(model, [torch.randn(8, 32)], loss, float8="mxfp8", probes=2, **OPTIONS)
    assert [effect.op for effect in in_blocks.effects if effect.products] == ["linear"]  # 16 is no multiple of 32
    of_output = autocastfx.sensitivity(model, [torch.randn(8, 32)], of="output", float8=True, probes=2, **OPTIONS)
    assert set(of_output["linear"].products) == {"output"}
    assert rms(of_output["linear"].products["output"]) > 0
