"""Shapes and bytes of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of, views_of
from autocastfx.report.view import Row
from benchmarks.models.tiny import CNN
from tests.golden.models import CASES, converted
from tests.report.shown import encoder_layer_with_symbols, with_symbols


def rows(amp_model: autocastfx.AmpModule) -> dict[str, Row]:
    return {row.name: row for row in view_of(amp_model).rows}


def sizes(amp_model: autocastfx.AmpModule) -> dict[str, tuple[str, int]]:
    return {name: (row.shape, row.bytes) for name, row in rows(amp_model).items()}


def test_a_size_that_may_differ_is_a_symbol_with_its_size_in_the_example() -> None:
    calls = [(torch.ones(size),) for size in ((2, 3, 8, 8), (4, 3, 10, 12))]
    found = sizes(with_symbols(CNN(), *calls, dtype="bfloat16"))
    assert found["images"] == ("[s0=4, 3, s1=10, s2=12]", 4 * 3 * 10 * 12 * 4)
    assert found["images_bfloat16"] == ("[s0=4, 3, s1=10, s2=12]", 4 * 3 * 10 * 12 * 2)
    assert found["conv_weight"] == ("[8, 3, 3, 3]", 8 * 3 * 3 * 3 * 4)
    assert found["max_pool2d"] == ("[s0=4, 8, s1//2=5, s2//2=6]", 4 * 8 * 5 * 6 * 2)
    assert found["output"] == ("", 0)


def test_sizes_of_the_first_call_are_numbers() -> None:
    found = sizes(converted("cnn"))
    assert found["images"] == ("[2, 3, 8, 8]", 2 * 3 * 8 * 8 * 4)
    assert found["max_pool2d"] == ("[2, 8, 4, 4]", 2 * 8 * 4 * 4 * 2)


def test_several_values_have_a_shape_each_and_no_tensor_has_none() -> None:
    found = sizes(encoder_layer_with_symbols())
    assert found["chunk"] == ("[s0=3, 9, 16] x 3", 3 * 3 * 9 * 16 * 2)
    assert found["sym_size_int"] == ("", 0)
    assert sizes(converted("no_grad"))["submod_1/x_bfloat16"] == ("[2, 8]", 2 * 8 * 2)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_of_the_values_that_a_call_makes(name: str) -> None:
    amp_model = converted(name)
    found = rows(amp_model)
    for cast in amp_model.plan.casts:
        assert found[cast.name].bytes > 0
        assert found[cast.name].bytes * 3 in (cast.bytes, 2 * cast.bytes)  # a cast reads one dtype and writes the other


class Picks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(-1) > 0] * 2


class Joins(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y, z] * 12) + 1


class Written(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))


@pytest.mark.parametrize(
    ("model", "inputs", "op", "shape"),
    [
        (Picks(), (torch.ones(3, 4),), "mul", "[u0, s1=4]"),
        (Joins(), (torch.ones(3, 4), torch.ones(5, 4), torch.ones(6, 4)), "add", "[…=168, s1=4]"),
        (Written(), (torch.ones(3, 4),), "gelu", "[s0=3, s1=4]"),
    ],
)
def test_what_is_not_a_plain_symbol(model: nn.Module, inputs: Any, op: str, shape: str) -> None:
    before = tuple(torch.ones([n + 1 for n in x.shape]) for x in inputs)
    amp_model = with_symbols(model.eval(), before, inputs, "float16")
    assert [row.shape for row in view_of(amp_model).rows if row.op == op and row.kind == "op"] == [shape]


def test_the_graphs_of_an_enabled_model_have_shapes() -> None:
    model = nn.Linear(8, 4)
    autocastfx.enable(model, dtype="float16")
    model(torch.ones(2, 8))
    (view,), _ = views_of(model, "dump shows")
    assert [row.shape for row in view.rows if row.op == "linear"] == ["[2, 4]"]
