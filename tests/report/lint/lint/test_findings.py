"""The lint as text: kept for two models, and what long reports leave out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.errors import GpuError
from tests.golden.models import LINTS, converted, kept_lint


@pytest.mark.parametrize("name", LINTS)
def test_the_text_is_as_kept(name: str) -> None:
    assert f"{autocastfx.lint(converted(name))}\n" == kept_lint(name).read_text(encoding="utf-8"), (
        "run `python -m tests.golden` and review what changed"
    )


def test_long_tables_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(15 + n, 16 + n) for n in range(30)))
    text = str(autocastfx.lint(autocastfx.convert(model, torch.ones(8, 15), dtype=torch.bfloat16, check=False)))
    assert text.count("\nN ") + text.count("\nK ") == 20
    assert "\nand 32 more\n" in text
    assert " more ops and casts: " in text


def test_what_is_not_known_is_said() -> None:
    found = autocastfx.lint(converted("cnn"))
    some = (dataclasses.replace(found.ops[0], flops=None),)
    text = str(dataclasses.replace(found, ops=some, float32_products=tuple("abcdefghijkl")))
    assert f"FLOP not known of: {some[0].node}" in text
    assert "without tensor cores: a, b, c, d, e, f, g, h, i, j and 2 more\n" in text


def test_no_product_in_16_bits_is_not_a_product_of_good_sizes() -> None:
    found = autocastfx.lint(autocastfx.convert(nn.ReLU(), torch.ones(8, 8), dtype="float16", check=False))
    assert "\nsizes: no product is known to run in float16\n" in str(found)
    good = autocastfx.lint(autocastfx.convert(nn.Linear(8, 8), torch.ones(8, 8), dtype="float16", check=False))
    assert "\nsizes: all products in float16 have multiples of 8\n" in str(good)


def test_a_limit_that_is_none() -> None:
    found = autocastfx.lint(
        autocastfx.convert(nn.Linear(8, 8, bias=False), torch.ones(8, 8), dtype="float16", check=False)
    )
    assert found.limit == float("inf")
    assert "if only the products were faster, and without limit beyond\n" in str(found)


def test_sizes_that_keep_products_out_of_float8_are_told() -> None:
    model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 64), nn.Linear(64, 64))
    rules = autocastfx.OpList.of({"float8": [{"ops": ["linear"], "recipe": "rowwise"}]})
    amp_model = autocastfx.convert(model, torch.ones(32, 64), dtype="bfloat16", op_list=["default", rules], check=False)
    found = autocastfx.lint(amp_model, "H100")
    assert found.out_of_float8 == (("linear", "N", 100, 16), ("linear_1", "K", 100, 16))
    assert "\nfloat8 takes multiples of 16; pad N of linear from 100 to 112, K of linear_1 from 100 to 112\n" in str(
        found
    )
    assert '"out_of_float8": [' in found.to_json()
    assert "float8" not in str(
        autocastfx.lint(autocastfx.convert(model, torch.ones(32, 64), dtype="bfloat16", check=False), "H100")
    )


def test_products_in_float8_are_timed_at_their_rate() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048))
    rules = autocastfx.OpList.of(
        {"float8": [{"ops": ["linear"]}], "modules": [{"path": "2", "float8": {"products": ["input_gradient"]}}]}
    )
    inputs = torch.ones(1, 1).expand(8192, 2048)
    amp_model = autocastfx.convert(
        model, inputs, dtype="bfloat16", op_list=["bfloat16", rules], device="cuda", check=False
    )
    gpu = autocastfx.Gpu("mine", 100, 10, 1e6, float8_tflops=400)  # memory takes nearly no time
    found = autocastfx.lint(amp_model, gpu)
    flops = 2 * 8192 * 2048 * 2048
    times = {op.node: op.seconds for op in found.ops if op.flops}
    assert times == {"linear": pytest.approx(flops / 4e14), "linear_1": pytest.approx(flops / 1e14)}
    assert found.after.in_products == pytest.approx(sum(times.values()))
    assert found.uncounted == ()
    assert "\nrates: 100 TFLOP/s in tensor cores, 400 in float8, 10 in float32, 1e+06 GB/s" in str(found)
    assert "Below 0 FLOP a byte in bfloat16, 0 in float8, 0 in float32" in str(found)
    assert "\nsizes: all products in bfloat16 have multiples of 8\n" in str(found)
    assert '"in_float8": true' in found.to_json()
    with pytest.raises(GpuError, match="no float8 rate is known of A100"):
        autocastfx.lint(amp_model)
    only_backward = autocastfx.OpList.of({"float8": [{"ops": ["linear"], "products": ["input_gradient"]}]})
    amp_model = autocastfx.convert(
        *(model, inputs), dtype="bfloat16", op_list=["bfloat16", only_backward], device="cuda", check=False
    )
    assert "float8, " not in str(autocastfx.lint(amp_model)), "forward is in 16 bits, so no rate is asked for"


def test_weights_that_are_quantised_once_an_update_are_not_timed() -> None:
    model, inputs = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), torch.ones(64, 256)
    rules = autocastfx.OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"]}]})
    cast, cached = (
        autocastfx.lint(
            autocastfx.convert(model, inputs, dtype="bfloat16", op_list=rules, weights=weights, check=False), "H100"
        )
        for weights in ("cast", "cached")
    )
    of_weights = {op.node for op in cast.ops if "weight" in op.node}
    assert {op.node for op in cast.ops} - {op.node for op in cached.ops} == of_weights | {
        op.node for op in cast.ops if "bias" in op.node
    }
    assert cached.uncounted == ()
