"""How far the whole numbers of a graph may reach, and what is computed from those that 16 bits do not tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx

import autocastfx
from autocastfx.passes.analysis.exact_numbers import WholeNumbers, holds_one_number, largest_whole, told_apart
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from tests.decided import decided, traced
from tests.helpers import Function

X = torch.rand(2, 16)
LOW = torch.bfloat16


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    return traced(function, *(inputs or (X,)))


def graph_of_any_size(function: Callable[..., Any]) -> fx.Graph:
    """The graph that is captured at a second size."""
    amp_model = autocastfx.convert(Function(function), (X,))
    amp_model(torch.rand(3, 17))
    captured = amp_model.variants[-1].captured
    assert captured is not None
    return captured.graph


def whole(
    graph: fx.Graph, *, held: Mapping[str, float] | None = None, measured: Mapping[str, float] | None = None
) -> tuple[dict[str, float], set[str]]:
    """The reach of each float32 node of whole numbers, and the names of what is computed from large ones."""
    reached = {n: (measured or {})[n.name] for n in graph.nodes if n.name in (measured or {})}
    found = WholeNumbers.of(graph, held or {}, set(), reached, load_op_list("bfloat16"), load_kernel_facts(), LOW)
    floats = {n.name: most for n, most in found.reach.items() if n.meta["val"].dtype == torch.float32}
    return floats, {n.name for n in found.scaled}


def test_each_dtype_tells_whole_numbers_apart_up_to_a_power_of_two() -> None:
    for low in (torch.float16, torch.bfloat16):
        most = told_apart(low)
        numbers = torch.arange(most + 2, dtype=torch.float64)
        assert torch.equal(numbers[:-1].to(low).double(), numbers[:-1])
        assert not torch.equal(numbers.to(low).double(), numbers)


def test_counts_up_to_a_size_of_the_call_may_reach_any_number() -> None:
    graph = graph_of_any_size(lambda x: torch.arange(x.shape[0], dtype=torch.float32)[:, None] * x)
    floats, scaled = whole(graph)
    assert floats["arange"] == math.inf
    assert scaled == {"mul"}


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([-3.0, 2.0]), 3.0),
        (torch.tensor([1, 500]), 500.0),
        (torch.tensor([False, True]), 1.0),
        (torch.tensor([0.5, 1.0]), None),
        (torch.tensor([1.0, math.nan]), None),
        (torch.empty(0), None),
        (torch.ones(2, dtype=torch.complex64), None),
    ],
)
def test_the_largest_of_a_tensor_of_whole_numbers(tensor: Tensor, expected: float | None) -> None:
    assert largest_whole(tensor) == expected


FOUND: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "arange": (lambda x: torch.arange(300.0), 300),
    "full": (lambda x: torch.full((4,), 7.0), 7),
    "zeros": (lambda x: torch.zeros(4), 1),
    "a comparison": (lambda x: (x > 0).float(), 1),
    "a cast from integers": (lambda x: torch.arange(300).float(), 300),
    "floor": (lambda x: x.floor(), math.inf),
    "a view": (lambda x: torch.arange(300.0).view(3, 100).mT[None], 300),
    "added": (lambda x: torch.arange(300.0) + 5, 305),
    "subtracted": (lambda x: torch.arange(300.0) - torch.full((1,), 5.0), 305),
    "multiplied": (lambda x: torch.arange(300.0) * torch.full((1,), 4.0), 1200),
    "0 times anything": (lambda x: x.floor() * torch.full((1,), 0.0), 0),
    "clamped": (lambda x: x.round().clamp(-5, 9), 9),
    "a cumulative sum": (lambda x: torch.ones(16).cumsum(0), 16),
    "a sum": (lambda x: torch.ones(4, 8).sum(), 32),
    "a matrix product": (lambda x: torch.ones(16, 16).tril() @ (x > 0).float().mT, 16),
    "one of two": (lambda x: torch.where(x > 0, torch.full((1,), 3.0), torch.full((1,), 8.0)), 8),
    "picked": (lambda x: torch.arange(300.0)[torch.arange(1000) % 7], 300),
}


@pytest.mark.parametrize("name", FOUND)
def test_whole_numbers_reach_as_far_as_their_op_lets_them(name: str) -> None:
    function, expected = FOUND[name]
    graph = graph_of(lambda x: (function(x), x.exp()))
    made = graph.output_node().all_input_nodes[0].name
    assert whole(graph)[0][made] == expected


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x,
    "a view of one": lambda x: x.mT,
    "a half added": lambda x: torch.arange(300.0) + 0.5,
    "a fraction multiplied": lambda x: torch.arange(300.0) * 0.1,
    "with an input": lambda x: torch.arange(16.0) + x,
    "divided": lambda x: torch.arange(300.0) / 3,
    "a step that is none": lambda x: torch.arange(0.0, 5.0, 0.5),
    "a fill that is none": lambda x: torch.where(x > 0, torch.full((1,), 3.0), 0.5),
    "a product with an input": lambda x: torch.ones(16, 16).tril() @ x.mT,
    "an exponential": lambda x: torch.arange(3.0).exp(),
    "a root": lambda x: torch.arange(3.0).sqrt(),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_numbers_are_none(name: str) -> None:
    graph = graph_of(lambda x: (OTHER[name](x), x.exp()))
    assert graph.output_node().all_input_nodes[0].name not in whole(graph)[0]


def test_buffers_count_as_they_are_held_and_values_as_measured() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.arange(700.0))
            self.register_buffer("rates", torch.rand(700))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.steps + 1, self.rates + 1, x.round() * 1

    graph = traced(Model(), X)
    held = {str(n.target): 699.0 for n in graph.nodes if n.op == "get_attr" and "steps" in str(n.target)}
    added, other, rounded = graph.output_node().all_input_nodes
    reach, _ = whole(graph, held=held, measured={"round_1": 40.0})
    assert (reach[added.name], reach[rounded.name]) == (700, 40)
    assert other.name not in reach


def test_what_is_computed_from_numbers_that_16_bits_do_not_tell_apart() -> None:
    def slopes(x: Tensor) -> tuple[Tensor, ...]:
        far, near = torch.arange(600.0) * 0.1, torch.arange(200.0) * 0.1
        return far.view(2, -1).neg(), near.neg(), far.exp()

    graph = graph_of(slopes)
    far, near, grown = graph.output_node().all_input_nodes
    _, scaled = whole(graph)
    assert far.name in scaled
    assert near.name not in scaled
    assert grown.name not in scaled, "only what moves or scales them"


def test_what_counts_over_a_size_that_varies_has_no_bound_but_a_measured_one() -> None:
    graph = graph_of_any_size(lambda x: (x > 0).float().cumsum(-1).exp())
    assert whole(graph)[0]["cumsum"] == math.inf
    assert whole(graph, measured={"cumsum": 9.0})[0]["cumsum"] == 9


def test_a_product_with_numbers_beyond_what_is_told_apart_is_float32_and_says_so() -> None:
    def positions(x: Tensor, w: Tensor) -> Tensor:
        return torch.arange(4096.0).view(-1, 8) @ w

    w = torch.rand(8, 8)
    for low, upto in ((torch.bfloat16, "256"), (torch.float16, "2,048")):
        amp_model = autocastfx.convert(Function(positions), (X, w), dtype=low)
        node = amp_model.plan["matmul"]
        assert node.dtype == "float32"
        name = str(low).removeprefix("torch.")
        assert node.decision.reason == f"reads view: whole numbers up to 4,096; {name} tells them apart up to {upto}"
        assert torch.equal(amp_model(X, w), positions(X, w))


def test_a_few_whole_numbers_are_narrowed_as_all_others() -> None:
    amp_model = decided(lambda w: torch.arange(64.0).view(8, 8) @ w, torch.rand(8, 8), dtype=LOW)
    assert amp_model.plan["matmul"].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 3), True),
        (torch.full((3, 3), -1e9).triu(1), True),
        (torch.full((3, 3), -math.inf).triu(1), True),
        (torch.tensor([False, True]), True),
        (torch.tensor([0.0, -1.0, 1.0]), False),
        (torch.arange(3.0), False),
        (torch.tensor([math.nan, 0.0]), False),
        (torch.empty(0), False),
        (torch.ones(2, dtype=torch.complex64), False),
    ],
)
def test_a_tensor_of_one_number(tensor: Tensor, expected: bool) -> None:
    assert holds_one_number(tensor) is expected


def test_a_buffer_that_forward_updates_is_not_known_by_what_it_holds_now() -> None:
    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x @ self.seen.float()[:, None].expand(8, 8)

    plan = decided(Counted(), torch.rand(8, 8), dtype=torch.bfloat16).plan
    assert "whole numbers of any size" in plan["matmul"].decision.reason


@pytest.mark.parametrize("said", [{"allow": ["add"]}, {"modules": [{"path": "**", "category": "low", "ops": ["add"]}]}])
def test_a_size_blurs_no_value_that_is_shaped_by_it(said: dict[str, Any]) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 64, "use_cache": False}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special))  # type: ignore[arg-type]
    ids = torch.zeros(2, 16, dtype=torch.long)
    op_list = ("default", autocastfx.OpList.of(said))
    amp_model = autocastfx.convert(model, (), {"input_ids": ids}, dtype="bfloat16", op_list=op_list, check=False)
    residual = [n for n in amp_model.plan.nodes if n.op == "add" and n.module == "transformer.h.0"]
    assert len(residual) == 2
    assert {str(n.placement.run) for n in residual} == {"low"}


# -- integers beside 16-bit values ------------------------------------------------------------------------------------

Y = torch.rand(16, 16)
MEETING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda y, n: y + n,
    "subtracted from it": lambda y, n: n - y,
    "added in place": lambda y, n: y.clone().add_(n),
    "the larger": lambda y, n: torch.maximum(y, n),
    "one of the two": lambda y, n: torch.where(y > 0, y, n),
    "joined": lambda y, n: torch.cat([y, n]),
    "stacked": lambda y, n: torch.stack([y, n]),
    "multiplied and added": lambda y, n: torch.addcmul(y, y, n),
    "a single one": lambda y, n: y + n[0, 0],
}


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_integer_that_16_bits_do_not_hold_makes_an_op_float32(name: str, dtype: torch.dtype) -> None:
    far = torch.arange(3000, 3256).view(16, 16)
    plan = decided(lambda x: MEETING[name](x @ x, far), Y, dtype=dtype).plan
    meets = [node for node in plan.nodes if node.decision.source == "forced:whole"]
    assert [(node.dtype, "whole numbers up to 3,255" in node.decision.reason) for node in meets] == [("float32", True)]
    assert plan["matmul"].dtype == str(dtype).removeprefix("torch.")


NEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "what 16 bits hold": lambda y, n: y + n,
    "bytes": lambda y, n: y + (1000 * n).to(torch.uint8),
    "a mask": lambda y, n: y * (1000 * n > 3000),
    "an index": lambda y, n: y[1000 * n[:, 0] % 16],
    "a single one that is no addend": lambda y, n: y * (1000 * n)[0, 0],
}


@pytest.mark.parametrize("name", NEAR)
def test_other_integers_leave_an_op_in_16_bits(name: str) -> None:
    near = torch.arange(1, 257).view(16, 16)
    plan = decided(lambda x: NEAR[name](x @ x, near) @ x.mT, Y, dtype=LOW).plan
    assert not [node for node in plan.nodes if node.decision.source == "forced:whole"]


def test_a_grid_of_integers_is_as_exact_as_one_of_float32() -> None:
    """Places in an image of 1,000 columns, from offsets that a convolution gives."""

    def places(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: (x @ x + torch.arange(1000, 1016, dtype=dtype)) * 4.0

    exact = places(torch.int64)(Y)
    off = {
        dtype: float((autocastfx.convert(Function(places(dtype)), (Y,), dtype=LOW)(Y) - exact).abs().max())
        for dtype in (torch.float32, torch.int64)
    }
    assert off[torch.int64] == off[torch.float32] < 0.1
