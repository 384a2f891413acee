"""The lint as text: kept for two models, and what long reports leave out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import autocastfx
from tests.golden.models import LINTS, converted, kept_lint


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("name", LINTS)
def test_the_text_is_as_kept(name: str) -> None:
    assert f"{autocastfx.lint(converted(name))}\n" == kept_lint(name).read_text(encoding="utf-8"), (
        "run `python -m tests.golden` and review what changed"
    )


def test_long_tables_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(15 + n, 16 + n) for n in range(30)))
    text = str(autocastfx.lint(autocastfx.convert(model, torch.ones(8, 15), dtype=torch.bfloat16)))
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
    found = autocastfx.lint(autocastfx.convert(nn.ReLU(), torch.ones(8, 8), dtype="float16"))
    assert "\nsizes: no product is known to run in float16\n" in str(found)
    good = autocastfx.lint(autocastfx.convert(nn.Linear(8, 8), torch.ones(8, 8), dtype="float16"))
    assert "\nsizes: all products in float16 have multiples of 8\n" in str(good)


def test_a_limit_that_is_none() -> None:
    found = autocastfx.lint(autocastfx.convert(nn.Linear(8, 8, bias=False), torch.ones(8, 8), dtype="float16"))
    assert found.limit == float("inf")
    assert "if only the products were faster, and without limit beyond\n" in str(found)


def test_sizes_that_keep_products_out_of_float8_are_told() -> None:
    model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 64), nn.Linear(64, 64))
    rules = autocastfx.OpList.of({"float8": [{"ops": ["linear"], "recipe": "rowwise"}]})
    amp_model = autocastfx.convert(model, torch.ones(32, 64), dtype="bfloat16", op_list=["default", rules])
    found = autocastfx.lint(amp_model, "H100")
    assert found.out_of_float8 == (("linear", "N", 100), ("linear_1", "K", 100))
    assert "\nfloat8 takes multiples of 16; pad N of linear from 100 to 112, K of linear_1 from 100 to 112\n" in str(
        found
    )
    assert '"out_of_float8": [' in found.to_json()
    assert "float8" not in str(autocastfx.lint(autocastfx.convert(model, torch.ones(32, 64), dtype="bfloat16"), "H100"))
