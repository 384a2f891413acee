"""Which sizes of which op count, and who gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autocastfx
from autocastfx.graph.walk import walk
from autocastfx.report.lint.odd_size import Size, sizes_of
from tests.helpers import Function
from tests.report.shown import with_symbols


def sizes(model: nn.Module, *inputs: torch.Tensor) -> list[Size]:
    """Of all ops of the model, where sizes of 5 and of 15 differed from call to call."""
    before = tuple(torch.ones([n + 1 if n in (5, 15) else n for n in x.shape]) for x in inputs)
    captured = with_symbols(model.eval(), before, inputs, "bfloat16").variants[0].captured
    assert captured is not None
    return [size for one in walk(captured.graph, captured.attributes) for size in sizes_of(one)]


class Weighted(nn.Module):
    """A function of an input and one weight."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


M, N, K = (Size("M", "input", 15), Size("N", "weight", 7), Size("K", "weight", 4))


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    {
        "linear": (Weighted(lambda x, w: F.linear(x, w), 7, 4), (3, 5, 4), [M, N, K]),
        "matmul by a matrix": (Weighted(lambda x, w: x @ w, 4, 7), (3, 5, 4), [M, N, K]),
        "matmul by a view": (Weighted(lambda x, w: x @ w.t(), 7, 4), (3, 5, 4), [M, N, K]),
        "mm": (Weighted(lambda x, w: torch.mm(x, w), 4, 7), (15, 4), [M, N, K]),
        "addmm": (Weighted(lambda x, w: torch.addmm(x[:, :1], x, w), 4, 7), (15, 4), [M, N, K]),
        "bmm": (Weighted(lambda x, w: torch.bmm(x, w.expand(x.shape[0], 4, 7)), 1, 4, 7), (2, 15, 4), [M, N, K]),
        "baddbmm": (Weighted(lambda x, w: torch.baddbmm(w, x, w), 2, 4, 4), (2, 4, 4), None),
        "the weight left": (
            Weighted(lambda x, w: w @ x, 7, 4),
            (4, 15),
            [Size("M", "weight", 7), Size("N", "input", 15), Size("K", "weight", 4)],
        ),
        "conv2d": (
            Weighted(lambda x, w: F.conv2d(x, w), 6, 3, 1, 1),
            (2, 3, 4, 4),
            [Size("channels in", "weight", 3), Size("channels out", "weight", 6)],
        ),
        "conv2d in groups": (
            Weighted(lambda x, w: F.conv2d(x, w, groups=2), 6, 2, 1, 1),
            (2, 4, 4, 4),
            [Size("channels in", "weight", 2), Size("channels out", "weight", 3)],
        ),
        "conv_transpose1d in groups": (
            Weighted(lambda x, w: F.conv_transpose1d(x, w, groups=2), 4, 5, 2),
            (2, 4, 3),
            [Size("channels in", "weight", 2), Size("channels out", "weight", 5)],
        ),
        "a vector": (Weighted(lambda x, w: x @ w, 4), (3, 4), []),
        "no product": (Weighted(lambda x, w: x + w, 4), (3, 4), []),
    }.values(),
)
def test_sizes(model: nn.Module, x: tuple[int, ...], expected: list[Size] | None) -> None:
    found = sizes(model, torch.ones(x))
    if expected is None:
        expected = [Size("M", "activation", 4), Size("N", "weight", 4), Size("K", "weight", 4)]
    assert found == expected


def test_of_one_call_it_is_not_known_whether_the_caller_gives_a_size() -> None:
    captured = autocastfx.convert(nn.Linear(4, 7), torch.ones(15, 4), dtype="bfloat16").variants[0].captured
    assert captured is not None
    found = [size for one in walk(captured.graph, captured.attributes) for size in sizes_of(one)]
    assert [(size.name, size.operand) for size in found] == [("M", "activation"), ("N", "weight"), ("K", "weight")]


def test_attention_has_the_sizes_of_its_heads() -> None:
    q, v = torch.ones(1, 2, 4, 12), torch.ones(1, 2, 4, 20)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x.reshape(1, 2, -1, 12), x.reshape(1, 2, -1, 12), y.reshape(1, 2, -1, 20))

    assert sizes(Function(function), q, v) == [Size("head", "activation", 12), Size("head", "activation", 20)]


@pytest.mark.parametrize(
    ("size", "padded", "wasted"), [(8, 8, 0), (9, 16, 7 / 16), (1, 8, 7 / 8), (50257, 50264, 7 / 50264)]
)
def test_padding(size: int, padded: int, wasted: float) -> None:
    found = Size("N", "weight", size)
    assert found.padded == padded
    assert found.wasted == pytest.approx(wasted)


def test_a_size_that_depends_on_data_is_left_out() -> None:
    found = sizes(Weighted(lambda x, w: F.linear(x[x[:, 0] > 0], w), 7, 4), torch.ones(5, 4))
    assert found == [N, K]
