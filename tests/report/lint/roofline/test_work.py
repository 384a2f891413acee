"""Operations and bytes against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.graph.node import attribute, attributes_of
from autocastfx.graph.walk import walk
from autocastfx.report.lint.roofline import Work, work_of
from tests.helpers import Function
from tests.report.shown import with_symbols


def works(function: Callable[..., Any], *inputs: torch.Tensor, captured: bool = True) -> dict[str, Work]:
    """Of each node of the function, as captured or as converted."""
    amp_model = autocastfx.convert(Function(function), inputs, dtype=torch.bfloat16)
    graph = amp_model.graph
    if captured:
        original = amp_model.variants[0].captured
        assert original is not None
        graph = original.graph
    held = {str(n.target): attribute(amp_model, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    return {one.name: work_of(one.node) for one in walk(graph, held)}


@pytest.mark.parametrize(
    ("function", "sizes", "flops", "numbers"),
    {
        "linear": (lambda x, w: F.linear(x, w), [(2, 5, 16), (48, 16)], 2 * 10 * 16 * 48, 160 + 768 + 480),
        "matmul": (lambda x, y: x @ y, [(3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6, 60 + 90 + 72),
        "einsum": (
            lambda x, y: torch.einsum("bij,bjk->bik", x, y),
            [(3, 4, 5), (3, 5, 6)],
            2 * 3 * 4 * 5 * 6,
            60 + 90 + 72,
        ),
        "conv2d": (
            lambda x, w: F.conv2d(x, w, padding=1),
            [(2, 3, 8, 8), (4, 3, 3, 3)],
            2 * (2 * 8 * 8) * (3 * 3 * 3) * 4,
            384 + 108 + 512,
        ),
        "scaled_dot_product_attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            [(2, 2, 5, 8)] * 3,
            2 * (2 * 2) * 5 * 5 * 8 * 2,
            4 * 160,
        ),
        "add": (lambda x, y: x + y, [(3, 4), (3, 4)], 0, 36),
        "softmax": (lambda x: x.softmax(-1), [(3, 4)], 0, 24),
    }.values(),
)
def test_of_one_op(function: Callable[..., Any], sizes: list[tuple[int, ...]], flops: int, numbers: int) -> None:
    (work,) = works(function, *(torch.ones(size) for size in sizes)).values()
    assert work == Work(flops, 4 * numbers, ("float32",))


def test_views_move_nothing_and_casts_move_both_widths() -> None:
    found = works(lambda x, w: F.linear(x.t(), w).chunk(2), torch.ones(16, 8), torch.ones(8, 16), captured=False)
    assert {name: work.bytes for name, work in found.items() if name in ("t", "chunk", "getitem")} == {
        "t": 0,
        "chunk": 0,
        "getitem": 0,
    }
    casts = {name: work for name, work in found.items() if name.endswith("bfloat16")}
    assert [(work.bytes, work.reads, work.low) for work in casts.values()] == [(128 * 6, ("float32",), False)] * 2
    assert found["linear"].bytes == 2 * (128 + 128 + 64)
    assert found["linear"].low


def linear_in_float8(training: bool, **keys: Any) -> dict[str, Work]:
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"], **keys}]})
    model = nn.Linear(64, 96).train(training)
    amp_model = autocastfx.convert(model, torch.ones(4, 8, 64), dtype="bfloat16", op_list=lists)
    return {one.name: work_of(one.node) for one in walk(amp_model.graph, attributes_of(amp_model, amp_model.graph))}


@pytest.mark.parametrize("training", [True, False])
def test_a_product_in_float8_reads_what_was_quantised(training: bool) -> None:
    found, (m, n, k) = linear_in_float8(training), (32, 96, 64)
    flops = 2 * m * n * k
    scales = 4 * (m + n)
    reads = ("float8_e4m3fn", "float32")
    assert found["linear"] == Work(flops, m * k + n * k + scales + 2 * m * n, reads, in_float8=True)
    assert found["linear"].low
    # Of each operand two bytes are read and one is written, once for each layout.
    quantised = [work for name, work in found.items() if "_float8_" in name]
    rows = [3 * m * k + 4 * m, 3 * n * k + 4 * n]
    columns = [3 * m * k + 4 * k, 3 * n * k + 4 * k]
    assert sorted(work.bytes for work in quantised) == sorted(rows + columns if training else rows)
    assert {(work.flops, work.reads) for work in quantised} == {(0, ("bfloat16",))}


def test_of_a_product_in_16_bits_float8_in_backward_changes_nothing() -> None:
    found = linear_in_float8(training=True, products=["input_gradient", "weight_gradient"])
    assert found["linear"] == Work(2 * 32 * 96 * 64, 2 * (32 * 64 + 96 * 64 + 96 + 32 * 96), ("bfloat16",))
    emulated = linear_in_float8(training=True, emulate=True)["linear"]
    assert (emulated.in_float8, emulated.low, emulated.flops) == (False, False, 2 * 32 * 96 * 64)


def test_blocks_have_a_byte_of_scale() -> None:
    found, (m, n, k) = linear_in_float8(training=False, recipe="mxfp8"), (32, 96, 64)
    read = (m + n) * (k + k // 32)
    assert found["linear"] == Work(2 * m * n * k, read + 2 * m * n, ("float8_e4m3fn", "float8_e8m0fnu"))
    assert not found["linear"].low, "no tensor cores are called"


def test_a_gather_reads_what_it_gives() -> None:
    amp_model = autocastfx.convert(
        nn.Embedding(1000, 8), torch.zeros(5, dtype=torch.int64), dtype="float16", check=False
    )
    captured = amp_model.variants[0].captured
    assert captured is not None
    (one,) = walk(captured.graph, captured.attributes)
    assert work_of(one.node) == Work(0, 2 * 5 * 8 * 4 + 5 * 8, ("float32", "int64"))


def test_what_is_no_aten_op_has_no_known_operations() -> None:
    @torch.library.custom_op("hardware::twice", mutates_args=())
    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    @twice.register_fake
    def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    (work,) = works(lambda x, y: torch.ops.hardware.twice(x, y), torch.ones(2, 2), torch.ones(2, 2)).values()
    assert work == Work(None, 48, ("float32",))


def test_a_size_that_depends_on_data_counts_as_one() -> None:
    found = works(lambda x: x[x > 0] * 2, torch.ones(8))
    assert found["mul"].bytes == 8


def test_reading_a_size_moves_nothing() -> None:
    function = Function(lambda x: x.new_ones(x.shape[0], 3) * x)
    captured = with_symbols(function, (torch.ones(8, 3),), (torch.ones(9, 3),), "bfloat16").variants[0].captured
    assert captured is not None
    sizes = [one for one in walk(captured.graph, captured.attributes) if one.name.startswith("sym_size")]
    assert [work_of(one.node).bytes for one in sizes] == [0]
