"""The sizes of contractions and reductions, and the limits that lists set."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import autocastfx
from autocastfx.graph.names import op_name
from autocastfx.graph.node import largest_size
from autocastfx.graph.sizes import KINDS, Product, product
from autocastfx.plan.plan import Decision
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import OpList
from tests.helpers import Function, op_list

ones = torch.ones
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = {
    "linear": (F.linear, (ones(2, 6), ones(3, 6)), 6),
    "bilinear": (F.bilinear, (ones(2, 3), ones(2, 5), ones(4, 3, 5)), 15),
    "conv1d": (F.conv1d, (ones(1, 4, 9), ones(2, 4, 3)), 12),
    "conv2d": (lambda x, w: F.conv2d(x, w, groups=2), (ones(1, 4, 9, 9), ones(2, 2, 3, 5)), 30),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, groups=2),
        (ones(1, 4, 5, 5), ones(4, 3, 2, 2)),
        8,
    ),
    "matmul": (torch.matmul, (ones(2, 3, 7), ones(7, 5)), 7),
    "mm": (torch.mm, (ones(3, 7), ones(7, 5)), 7),
    "bmm": (torch.bmm, (ones(2, 3, 7), ones(2, 7, 5)), 7),
    "mv": (torch.mv, (ones(3, 7), ones(7)), 7),
    "dot": (torch.dot, (ones(7), ones(7)), 7),
    "addmm": (torch.addmm, (ones(5), ones(3, 7), ones(7, 5)), 7),
    "baddbmm": (torch.baddbmm, (ones(2, 3, 5), ones(2, 3, 7), ones(2, 7, 5)), 7),
    "inner": (torch.inner, (ones(3, 7), ones(2, 7)), 7),
    "einsum": (lambda a, b: torch.einsum("b i j, b k j -> b i k", a, b), (ones(2, 3, 7), ones(2, 4, 7)), 7),
    "sum": (lambda x: x.sum((1, 2)), (ones(2, 3, 5),), 15),
    "mean": (lambda x: x.mean(-1, keepdim=True), (ones(2, 3, 5),), 5),
    "var_mean": (lambda x: torch.var_mean(x, 0)[0], (ones(9, 2),), 9),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (ones(1, 3, 8, 8),), 16),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 4), (ones(1, 3, 8),), 4),  # in no group: what goes in and comes out
}


@pytest.mark.parametrize("op", CASES)
@pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")
def test_depth(op: str, tmp_path: Path) -> None:
    function, inputs, expected = CASES[op]

    def decided(limit: int) -> Decision:
        text = f"allow: [{op}]\nreduction_depth: {{{op}: {limit}}}\nproduct_depth: null"
        rules = ["default", op_list(tmp_path, text)]
        plan = autocastfx.convert(Function(lambda *args: function(*args)), inputs, op_list=rules, dtype="float16").plan
        return next(n.decision for n in plan.nodes if n.op == op)

    assert str(decided(expected).source).endswith("test.yaml:1:9")
    forced = decided(expected - 1)
    assert forced.reason == f"reduces {expected} elements, more than reduction_depth {expected - 1}"
    assert str(forced.category) == "deny"
    assert str(forced.source).endswith(f"test.yaml:2:{20 + len(op) + 1}")


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("...ij,...kj->...ik", [(2, 3, 7), (2, 4, 7)], 7),
        ("ij...,jk...->ik...", [(3, 7, 2), (7, 4, 2)], 7),
        ("ab,bc,cd->ad", [(2, 3), (3, 5), (5, 2)], 15),
        ("ij->", [(3, 7)], 21),
        ("ij,ij->ij", [(3, 7), (3, 7)], 1),
        ("ij,jk", [(3, 7), (7, 4)], None),
    ],
)
def test_an_equation(equation: str, shapes: list[tuple[int, ...]], expected: int | None, tmp_path: Path) -> None:
    def model(*operands: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *operands)

    rules = ["default", op_list(tmp_path, "reduction_depth: {einsum: 1}\nproduct_depth: null")]
    plan = autocastfx.convert(Function(model), tuple(ones(s) for s in shapes), op_list=rules, dtype="float16").plan
    forced = [n.decision.reason for n in plan.nodes if n.dtype == "float32" and n.op == "einsum"]
    deep = expected is not None and expected > 1
    assert forced == ([f"reduces {expected} elements, more than reduction_depth 1"] if deep else [])


def lists(tmp_path: Path, *texts: str) -> OpList:
    merged = OpList()
    for text in texts:
        merged = merged.merged(op_list(tmp_path, text))
    return merged


def test_a_number_alone_is_the_limit_of_the_reductions(tmp_path: Path) -> None:
    rules = lists(tmp_path, "allow: [sum, linear]\nreduction_depth: 4")
    plan = autocastfx.convert(
        Function(lambda x: F.linear(x, x).sum(1)), (ones(8, 8),), op_list=rules, dtype="float16"
    ).plan
    assert plan["sum_1"].dtype == "float32"
    assert str(plan["sum_1"].decision.source).endswith("test.yaml:2:18")
    assert plan["linear"].dtype == "float16"


def test_merging(tmp_path: Path) -> None:
    first, second = "reduction_depth: {mean: 4, linear: 9, sum: 5}", "reduction_depth: {mean: 8, linear: null}"
    merged = lists(tmp_path, first, second)
    assert {op: limit.most for op, limit in merged.reduction_depth.items()} == {"mean": 8, "linear": None, "sum": 5}
    for_all = lists(tmp_path, first, "reduction_depth: 7")
    limit = for_all.depth_limit("mean", of_group=True)
    assert limit is not None
    assert limit.most == 7
    assert for_all.depth_limit("linear", of_group=False) is None
    after = lists(tmp_path, "reduction_depth: 7", first).depth_limit("mean_", of_group=True)
    assert after is not None
    assert after.most == 4, "an op's own limit goes before the group's, and in-place ops have it too"
    assert (
        lists(tmp_path, "allow: [sum]", first).merged(OpList()).reduction_depth
        == lists(tmp_path, first).reduction_depth
    )
    assert pickle.loads(pickle.dumps(merged)) == merged


def test_null_lifts_a_limit(tmp_path: Path) -> None:
    rules = lists(tmp_path, "allow: [sum]\nreduction_depth: 4", "reduction_depth: {sum: null}")
    plan = autocastfx.convert(Function(lambda x: x.sum(1)), (ones(8, 8),), op_list=rules, dtype="float16").plan
    assert plan["sum_1"].dtype == "float16"


def test_sizes_that_depend_on_data_are_not_judged(tmp_path: Path) -> None:
    rules = ["default", lists(tmp_path, "allow: [sum]\nreduction_depth: 1")]
    plan = autocastfx.convert(Function(lambda x: x[x > 0].sum()), (ones(8),), op_list=rules, dtype="float16").plan
    assert plan["sum_1"].dtype == "float16"


def test_every_kind_of_the_table_is_known() -> None:
    facts = load_kernel_facts()
    assert set(facts.reduces.values()) == set(KINDS)


def test_a_limit_holds_in_the_modules_that_use_the_op(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    rules = ["default", lists(tmp_path, "reduction_depth: {linear: 16}")]
    plan = autocastfx.convert(model, (ones(1, 8),), op_list=rules, dtype="float16").plan
    assert (plan["linear"].dtype, plan["linear_1"].dtype) == ("float16", "float32")


# -- what a contraction is by its sizes -------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], Product]] = {
    "vectors": (torch.dot, (ones(7), ones(7)), Product(7, is_sum=True)),
    "vectors of a batch": (torch.linalg.vecdot, (ones(3, 7), ones(3, 7)), Product(7, is_sum=True)),
    "outer": (torch.outer, (ones(7), ones(5)), Product(1)),
    "kron": (torch.kron, (ones(2, 2), ones(3, 3)), Product(1)),
    "named dimensions": (lambda a, b: torch.tensordot(a, b, dims=2), (ones(2, 3, 5), ones(3, 5, 4)), Product(15)),
    "matrices": (torch.matmul, (ones(3, 7), ones(7, 5)), Product(7)),
    "matrices of a batch and a vector": (torch.matmul, (ones(2, 3, 7), ones(7)), Product(7)),
    "one row and one column": (lambda a, b: a[:, :1].mT @ b[:, :1], (ones(7, 7), ones(7, 7)), Product(7, is_sum=True)),
    "one row and one column, in a batch": (
        lambda a, b: a[:, None] @ b[..., None],
        (ones(4, 7), ones(4, 7)),
        Product(7, is_sum=True),
    ),
    "an equation that keeps the batch alone": (
        lambda a, b: torch.einsum("bd,bd->b", a, b),
        (ones(3, 7), ones(3, 7)),
        Product(7, is_sum=True),
    ),
    "an equation that contracts nothing": (
        lambda a, b: torch.einsum("i,j->ij", a, b),
        (ones(3), ones(7)),
        Product(1),
    ),
    "an equation of one operand": (lambda a: torch.einsum("ij->i", a), (ones(3, 7),), Product(7, is_sum=True)),
    "an equation of matrices": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (ones(3, 7), ones(7, 5)), Product(7)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_sizes_of_a_contraction(name: str) -> None:
    function, inputs, expected = SHAPES[name]
    captured = (
        autocastfx.convert(Function(lambda *args: function(*args)), inputs, op_list=OpList(), dtype="float16")
        .variants[0]
        .captured
    )
    assert captured is not None
    reduces = load_kernel_facts().reduces
    (node,) = [n for n in captured.graph.nodes if op_name(n) in reduces]
    assert product(node, reduces[op_name(node)]) == expected


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def at_any_size(*shapes: tuple[int, int]) -> fx.Node:
    """The product in a graph that was captured at a second size, so that its sizes are symbols."""
    amp_model = autocastfx.convert(Function(matmul), (ones(3, 3), ones(3, 3)), dtype="float16")
    amp_model(*map(ones, shapes))
    captured = amp_model.variants[-1].captured
    assert captured is not None
    (node,) = [n for n in captured.graph.nodes if op_name(n) == "matmul"]
    return node


def test_a_size_that_is_1_in_the_example_alone_makes_no_sum() -> None:
    node = at_any_size((2, 7), (7, 2))
    rows = node.args[0].meta["val"].shape[0]
    assert isinstance(rows, torch.SymInt), "rows may be of any number"
    assert product(node, "matrices", lambda size: 1) == Product(1)


def test_the_largest_sizes_may_be_asked_for() -> None:
    node = at_any_size((9, 12), (12, 5))
    assert product(node, "matrices") == Product(12)
    assert product(node, "matrices", largest_size) == Product(math.inf)


@pytest.mark.parametrize("preset", ["float16", "bfloat16"])
def test_few_elements_are_elementwise_work_and_one_number_is_a_sum(preset: str) -> None:
    dtype = getattr(torch, preset)

    def decided(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Decision:
        plan = autocastfx.convert(Function(function), tuple(map(ones, shapes)), dtype=dtype).plan
        return plan.nodes[0].decision

    few = decided(matmul, (5, 7), (7, 5))
    assert (str(few.category), few.reason) == (
        "infer",
        "adds up 7 elements, fewer than product_depth 8: elementwise work",
    )
    assert str(few.source).startswith("op_lists/base.yaml:")
    assert str(decided(matmul, (5, 8), (8, 5)).category) == "allow"
    number = decided(lambda a, b: torch.dot(a, b), (64,), (64,))
    assert number.reason.startswith("adds up 64 elements into one number, as a sum does")
    rule = autocastfx.load_op_list(preset).rule("sum")
    assert rule is not None
    assert number.category is rule.category


def test_a_list_moves_or_lifts_the_limit() -> None:
    def category(depth: int | None) -> str:
        rules = ["default", OpList.of({"product_depth": depth})]
        return str(
            autocastfx.convert(Function(matmul), (ones(5, 7), ones(7, 5)), op_list=rules, dtype="float16")
            .plan.nodes[0]
            .decision.category
        )

    assert (category(7), category(16), category(None)) == ("allow", "infer", "allow")


def _attended(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1) @ x


def _summarised(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bnd,bne->bde", x.tanh(), x)


def _correlated(x: torch.Tensor) -> torch.Tensor:
    return torch.tensordot(x, x.tanh(), dims=([1], [1]))


@pytest.mark.parametrize("function", [_attended, _summarised, _correlated])
def test_few_elements_in_the_example_are_many_in_a_longer_call(function: Callable[..., Any]) -> None:
    """A graph that was captured for few elements is for few; one for many is for any number."""
    model = nn.Sequential(nn.Linear(16, 16), Function(function))

    def last(plan: autocastfx.Plan) -> str:
        return [str(n.decision.category) for n in plan.nodes if n.op in load_kernel_facts().reduces][-1]

    short = autocastfx.convert(model, (torch.randn(2, 4, 16),), dtype="bfloat16")
    assert last(short.plan) == "infer"
    for length, variants in ((4, 1), (7, 2), (8, 3), (512, 3), (3, 3), (7, 3)):
        short(torch.randn(2, length, 16))
        assert len(short.variants) == variants
    assert "<= 7" in str(short.variants[1].guard)
    assert [last(variant.plan) for variant in short.variants] == ["infer", "infer", "allow"]
    long = autocastfx.convert(model, (torch.randn(2, 16, 16),), dtype="bfloat16")
    assert last(long.plan) == "allow"
    for length in (32, 4, 64):
        long(torch.randn(2, length, 16))
    assert [last(variant.plan) for variant in long.variants] == ["allow", "allow"]


def test_a_sum_that_is_short_in_the_example_is_limited_in_a_longer_call(tmp_path: Path) -> None:
    rules = lists(tmp_path, "allow: [sum]\nreduction_depth: 8")
    amp_model = autocastfx.convert(Function(lambda x: x.sum(1)), (ones(2, 8),), op_list=rules, dtype="float16")
    for length, variants, dtype in ((8, 1, "float16"), (3, 2, "float16"), (7, 2, "float16"), (9, 3, "float32")):
        amp_model(ones(2, length))
        assert len(amp_model.variants) == variants
        assert amp_model.variants[-1].plan["sum_1"].dtype == dtype
