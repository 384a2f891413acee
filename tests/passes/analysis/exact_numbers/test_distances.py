"""Distances written as a² + b² - 2ab: their products are found, and float32; other sums of products are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autocastfx
from autocastfx.graph.names import op_name
from autocastfx.passes.analysis.exact_numbers import distance_products
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category
from tests.decided import traced
from tests.helpers import Function, relative_error

A, B = torch.rand(9, 8) + 10, torch.rand(7, 8) + 10
Form = Callable[[Tensor, Tensor], Any]


def found(function: Form) -> dict[str, str]:
    graph, rules = traced(function, A, B), load_op_list("bfloat16")
    allowed = {n: (r := rules.rule(op_name(n))) is not None and r.category is Category.ALLOW for n in graph.nodes}
    products = distance_products(graph, allowed, rules, load_kernel_facts())
    return {product.name: square.name for product, square in products.items()}


def plain(a: Tensor, b: Tensor) -> Tensor:
    return a.pow(2).sum(-1, keepdim=True) + b.pow(2).sum(-1) - 2 * (a @ b.mT)


def scaled_first(a: Tensor, b: Tensor) -> Tensor:
    return (a * a).sum(-1)[:, None] - (2 * a) @ b.mT + (b * b).sum(-1)[None]


def divided(a: Tensor, b: Tensor) -> Tensor:
    return (a**2).sum(-1, keepdim=True) + (b**2).sum(-1) - (a @ b.mT) / 0.5


def added_by_the_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(a.square().sum(-1, keepdim=True) + b.square().sum(-1), a, b.mT, alpha=-2)


def by_einsum(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("ik,ik->i", a, a)[:, None] + torch.einsum("jk,jk->j", b, b) - 2 * a @ b.mT


def by_linear(a: Tensor, b: Tensor) -> Tensor:
    return (a**2).sum(1, keepdim=True) + (b**2).sum(1) - 2 * torch.nn.functional.linear(a, b)


DISTANCES: dict[str, tuple[Form, str]] = {
    f.__name__: (f, product)
    for f, product in (
        (plain, "matmul"),
        (scaled_first, "matmul"),
        (divided, "matmul"),
        (added_by_the_product, "addmm"),
        (by_einsum, "matmul"),
        (by_linear, "linear"),
    )
}


@pytest.mark.parametrize("name", DISTANCES)
def test_the_product_of_a_distance_is_found(name: str) -> None:
    function, product = DISTANCES[name]
    products = found(function)
    assert products.keys() - set(products.values()) == {product}, "a square that an einsum computes is one, too"


OTHERS: dict[str, Form] = {
    "no square": lambda a, b: a.sum(-1, keepdim=True) - a @ b.mT,
    "the square of another value": lambda a, b: a.exp().pow(2).sum(-1, keepdim=True) - a @ b.mT,
    "a third power": lambda a, b: a.pow(3).sum(-1, keepdim=True) - a @ b.mT,
    "a square that is not added": lambda a, b: (a @ b.mT + 1, a.pow(2).sum(-1)),
    "a square that scales it": lambda a, b: a.pow(2).sum(-1, keepdim=True) * (a @ b.mT) + 1,
    "the product of two values": lambda a, b: (a * b[:1]).sum(-1, keepdim=True) - a @ b.mT,
    "a polynomial of the result": lambda a, b: (lambda y: y * y + y)(a @ b.mT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_none(name: str) -> None:
    assert found(OTHERS[name]) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_of_near_points_are_as_exact_as_in_float32(name: str, dtype: torch.dtype) -> None:
    function, product = DISTANCES[name]
    amp_model = autocastfx.convert(Function(function), (A, B), dtype=dtype)
    node = amp_model.plan[product]
    assert node.decision.source == "forced:cancellation"
    square = found(function)[product]
    assert node.decision.reason == f"is taken from the squares of its own operands ({square}): a small difference"
    exact = (A.double()[:, None] - B.double()).square().sum(-1)
    # The squares that cancel are near 900, and each of a few sums of them is rounded.
    bound = 16 * torch.finfo(torch.float32).eps * 900
    assert (amp_model(A, B) - exact).abs().max() <= bound
    assert relative_error(amp_model(A, B), function(A, B)) <= bound / float(exact.min())
