"""Gradients that meet in one element: how many they are, and that 16 bits add up few of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn import functional

import autocastfx
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import example, origin
from autocastfx.passes.analysis.backward_adds import Readers, contributions
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from tests.decided import decided
from tests.helpers import Function
from tests.nearness import assert_as_near_as_autocast, trained_on

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WIDTH = 32

# ---- contributions of one op -----------------------------------------------------------------------------------------

_I = torch.zeros(20, dtype=torch.long)
COUNTS: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "index_select": (lambda x: x.index_select(1, _I), 20),
    "gather": (lambda x: x.gather(2, _I.expand(2, 4, 20)), 20),
    "take": (lambda x: x.take(_I.view(4, 5)), 20),
    "take_along_dim": (lambda x: x.take_along_dim(_I.view(1, -1, 1), 1), 20),
    "index, pairs": (lambda x: x[_I % 2, _I], 20),
    "index, rows and columns": (lambda x: x[:, _I[:3, None], _I[None, :5]], 15),
    "index, mask": (lambda x: x[torch.ones(2, 4, 6) > 0], 1),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.full((4,), 5), 1), math.inf),
    "unfold": (lambda x: x.unfold(2, 5, 2), 3),
    "max_pool1d": (lambda x: functional.max_pool1d(x, 3, 2), 2),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x[None], (4, 3), (1, 3)), 4),
    "im2col": (lambda x: functional.unfold(x[None], 3), 9),
    "col2im": (lambda x: functional.fold(x.reshape(1, 6, 8)[:, :4, :], (5, 3), 2), 4),
    "replication_pad1d": (lambda x: functional.pad(x, (9, 0), mode="replicate"), 10),
    "replication_pad2d": (lambda x: functional.pad(x[None], (1, 2, 0, 4), mode="replicate"), 15),
    "reflection_pad1d": (lambda x: functional.pad(x, (1, 0), mode="reflect"), 2),
    "reflection_pad2d": (lambda x: functional.pad(x[None], (5, 1, 1, 0), mode="reflect"), 6),
    "circular": (lambda x: functional.pad(x, (1, 1), mode="circular"), 2),
    "adaptive_avg_pool1d": (lambda x: functional.adaptive_avg_pool1d(x, 3), 2),
    "adaptive_max_pool2d": (lambda x: functional.adaptive_max_pool2d(x[None], (9, 12)), 12),
    "upsample_bilinear2d": (lambda x: functional.interpolate(x[None], scale_factor=2, mode="bilinear"), 16),
    "grid_sampler": (lambda x: functional.grid_sample(x[None], torch.zeros(1, 3, 3, 2), align_corners=False), 18),
    "as_strided, windows": (lambda x: x.as_strided((2, 20, 5), (24, 1, 1)), 5),
    "as_strided, repeated": (lambda x: x.as_strided((7, 4, 6), (0, 6, 1)), 7),
    "as_strided, a view": (lambda x: x.as_strided((6, 4), (1, 6)), 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_most_gradients_that_meet_in_an_element(name: str) -> None:
    function, most = COUNTS[name]
    facts, x = load_kernel_facts(), torch.rand(2, 4, 6)
    program = torch.export.export(Function(function), (x,), strict=False)
    counted = [
        contributions(node, facts.contributions[op], example)
        for node in program.graph.nodes
        if isinstance(node.target, OpOverload) and (op := base_name(op_name(node))) in facts.contributions
    ]
    assert counted == [most]
    if math.isinf(most):
        return
    x.requires_grad_()
    function(x).sum().backward()
    largest = (
        float(x.grad.max()) if name != "avg_pool2d" else 1.0
    )  # the gradient of a sum counts, where all are the same
    assert largest <= most * (1 + 1e-6)


# ---- readers of a value ----------------------------------------------------------------------------------------------


def test_readers_are_counted_by_the_share_that_they_read() -> None:
    def read(x: Tensor) -> tuple[Tensor, ...]:
        halves = x.chunk(2)
        whole = x.reshape(-1)
        return (*(half.sin() for half in halves), whole.sin(), whole.cos(), x[:1].sin(), x[:1].cos(), x + x)

    graph = torch.export.export(Function(read), (torch.rand(4, 8),), strict=False).graph
    reads = {n for n in graph.nodes if n.op == "call_function"}
    moves = {n for n in reads if not any(op in n.name for op in ("sin", "cos", "add"))}
    readers = Readers.of(graph, reads.__contains__, moves.__contains__, load_op_list("bfloat16").backward_depth)
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    assert readers.counts[x] == 1 + 2 + 2 / 4 + 2
    assert readers.casts(x) == 1


class Reading(nn.Module):
    """A float32 stream of small gradients, read ``count`` times in one of several ways."""

    def __init__(self, read: Callable[[Tensor, int], Tensor], count: int = 100) -> None:
        super().__init__()
        self.read, self.count = read, count
        self.embed, self.inner, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.inner(x)
        return sum((torch.tanh((k % 7 + 1) * self.out(self.read(x, k))) for k in range(self.count)), torch.zeros(8))


READS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "itself": lambda x, k: x,
    "views": lambda x, k: x.transpose(0, 1),
    "parts that overlap": lambda x, k: x[:, k % 10 : k % 10 + 10],
    "an activation": lambda x, k: torch.relu(x),
}
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(1, torch.zeros(400, dtype=torch.long)),
    "index": lambda x: x[:, torch.zeros(400, dtype=torch.long)],
    "max_pool": lambda x: functional.max_pool2d(x[None], (19, 19), 1, 9)[0],
    "unfold": lambda x: functional.unfold(x.transpose(1, 2)[..., None], (21, 1), padding=(10, 0)).view(-1, WIDTH),
    "replicated border": lambda x: functional.pad(x.transpose(1, 2), (300, 0), mode="replicate").transpose(1, 2),
    "wide averages": lambda x: functional.adaptive_avg_pool1d(x.transpose(1, 2), 4000).transpose(1, 2),
    "as_strided": lambda x: x.as_strided((4, 10, 11, WIDTH), (20 * WIDTH, WIDTH, WIDTH, 1)).repeat(1, 4, 4, 1),
}


def _assert_as_exact_as_autocast(model: nn.Module, ids: Tensor, low: torch.dtype) -> None:
    step = trained_on(ids, loss=lambda out: (out.float() - 1).square().mean())
    assert_as_near_as_autocast(step, model, autocastfx.convert(model, (ids,), dtype=low, check=False), low)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", READS)
def test_gradients_of_many_readers_are_as_exact_as_torch_autocasts(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    _assert_as_exact_as_autocast(Reading(READS[name]), torch.randint(50, (4, 20)), DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low_before", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_ops_that_add_up_are_as_exact_as_torch_autocasts(name: str, low_before: bool, dtype: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.inner(self.embed(ids))
            return self.out(OPS[name](x if low_before else x + self.embed(ids)))

    torch.manual_seed(0)
    _assert_as_exact_as_autocast(Net(), torch.randint(50, (4, 20)), DTYPES[dtype])


def casts_of(amp_model: fx.GraphModule, name: str) -> list[int]:
    """The number of readers of each cast of the value ``name``, in the graph's order."""
    marks = [(node, origin(node)) for node in amp_model.graph.nodes]
    return [len(node.users) for node, mark in marks if mark is not None and mark.value == name]


def many(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    def read(x: Tensor, w: Tensor) -> Tensor:
        h = x + x @ x
        return sum((torch.tanh(h @ (w * k)) for k in range(1, count + 1)), torch.zeros(8, 8))

    return read


def test_sixteen_readers_share_a_cast() -> None:
    inputs = torch.rand(8, 8), torch.rand(8, 8)
    for count, shares in ((16, [16]), (17, [16, 1]), (40, [16, 16, 8])):
        assert casts_of(autocastfx.convert(Function(many(count)), inputs, dtype="bfloat16"), "add") == shares


def test_the_limit_is_a_key_of_lists() -> None:
    inputs = torch.rand(8, 8), torch.rand(8, 8)
    for limit, shares in ((None, [20]), (4, [4] * 5)):
        lists = autocastfx.OpList.of({"extends": "bfloat16", "backward_depth": limit})
        amp_model = autocastfx.convert(Function(many(20)), inputs, dtype="bfloat16", op_list=lists)
        assert casts_of(amp_model, "add") == shares


def test_further_casts_have_their_price() -> None:
    """The bytes of a plan count each."""
    inputs = torch.rand(8, 8), torch.rand(8, 8)
    plans = [
        decided(
            many(20),
            *inputs,
            dtype="bfloat16",
            op_list=autocastfx.OpList.of({"extends": "bfloat16", "backward_depth": limit}),
        ).plan
        for limit in (None, 4)
    ]
    assert plans[1].traffic.moved - plans[0].traffic.moved == 4 * 6 * 64


def test_an_op_that_a_person_names_runs_as_he_says() -> None:
    def picked(x: Tensor) -> Tensor:
        return (x @ x).index_select(0, torch.zeros(40, dtype=torch.long)) @ x

    x = torch.rand(32, 32)
    for rules, dtype, source in (({}, "float32", "base.yaml"), ({"clear": ["index_select"]}, "bfloat16", "OpList")):
        lists = autocastfx.OpList.of({"extends": "bfloat16", **rules})
        node = decided(picked, x, dtype="bfloat16", op_list=lists).plan["index_select"]
        assert (node.dtype, source in str(node.decision.source)) == (dtype, True)
    text = autocastfx.explain(autocastfx.convert(Function(picked), (x,), dtype="bfloat16", check=False), "index_select")
    assert "its kernel sums up to 40 gradients in bfloat16, more than backward_depth 16" in " ".join(str(text).split())


def test_more_in_another_call_is_another_graph() -> None:
    def picked(x: Tensor, index: Tensor) -> Tensor:
        return (x @ x).index_select(0, index) @ x

    amp_model = autocastfx.convert(
        Function(picked), (torch.rand(8, 8), torch.zeros(5, dtype=torch.long)), dtype="bfloat16"
    )
    assert amp_model.plan["index_select"].dtype == "bfloat16"
    amp_model(torch.rand(8, 8), torch.zeros(60, dtype=torch.long))
    assert amp_model.variants[-1].plan["index_select"].dtype == "float32"
    for count in (7, 40, 3):
        x, index = torch.rand(8, 8), torch.zeros(count, dtype=torch.long)
        torch.testing.assert_close(amp_model(x, index), picked(x, index), rtol=2**-5, atol=2**-5)


def test_equal_products_are_merged_only_as_long_as_16_bits_add_their_gradients_up() -> None:
    def repeated(x: Tensor) -> Tensor:
        return sum((torch.tanh(x @ x.mT) for _ in range(40)), torch.zeros(()))

    amp_model = decided(repeated, torch.rand(8, 8), dtype="bfloat16")
    assert len([n for n in amp_model.graph.nodes if op_name(n) == "matmul"]) == 3
