"""Each formula of a pattern is what its operator computes, is found in a graph, and names choose patterns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autocastfx.graph.node import attributes_of, set_value
from autocastfx.passes.patterns.patterns import (
    DENSE_MASK,
    GROUPED_ATTENTION,
    LOSS_CAST,
    MATH_ATTENTION,
    PATTERNS,
    REPEATED,
    SHORT_ATTENTION,
    TF32_PRODUCT,
    WIDE_LINEAR,
    Pattern,
    chosen,
)
from autocastfx.passes.recompose import recompose
from autocastfx.plan.plan import ALIGNED_PRODUCT

OF_ONE = [pattern for pattern in PATTERNS if "attention" not in pattern.name]  # attention has tests of its own
CASES = [(pattern, formula) for pattern in OF_ONE for formula in pattern.formulas]
IDS = [f"{p.name}-{i}" for p in OF_ONE for i, _ in enumerate(p.formulas)]
NAMES = (*(p.name for p in PATTERNS), REPEATED, LOSS_CAST, MATH_ATTENTION, SHORT_ATTENTION)
NAMES += (ALIGNED_PRODUCT, GROUPED_ATTENTION, DENSE_MASK, TF32_PRODUCT, WIDE_LINEAR)
WRITTEN = {"dims": [-1], "dim": -1, "eps": 1e-5}


def values(formula: Callable[..., Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Something for each parameter that stands for a value."""
    torch.manual_seed(0)
    names = [name for name in inspect.signature(formula).parameters if name not in WRITTEN]
    sizes = {"x": (7, 11), "weight": (11,), "bias": (11,)}
    return {name: 3 * torch.randn(sizes[name], dtype=dtype) for name in names}


def called(formula: Callable[..., Any], given: dict[str, Any]) -> Any:
    return formula(**{name: given[name] if name in given else WRITTEN[name] for name in parameters(formula)})


def parameters(formula: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(formula).parameters)


def operator(pattern: Pattern, formula: Callable[..., Any], given: dict[str, Tensor]) -> Tensor:
    """What the operator of ``pattern`` gives for the values that stand for the parameters of ``formula``."""
    graph, of_node, found = fx.Graph(), dict[fx.Node, Tensor](), dict[str, Any]()
    for name in parameters(formula):
        found[name] = WRITTEN.get(name)
        if name in given:
            found[name] = graph.placeholder(name)
            set_value(found[name], given[name])
            of_node[found[name]] = given[name]
    arguments = pattern.arguments(found)
    assert arguments is not None
    args, kwargs = fx.node.map_arg(arguments, lambda node: of_node[node])
    return pattern.target(*args, **kwargs)


@pytest.mark.parametrize(("pattern", "formula"), CASES, ids=IDS)
def test_a_formula_and_its_operator_agree_in_float64(pattern: Pattern, formula: Callable[..., Any]) -> None:
    given = {name: t.requires_grad_() for name, t in values(formula, torch.float64).items()}
    written, one = called(formula, given), operator(pattern, formula, given)
    # A hundred roundings of numbers below 100, which is what the terms of the derivatives reach.
    bound = {"rtol": 0.0, "atol": 100 * 100 * torch.finfo(torch.float64).eps}
    torch.testing.assert_close(written, one, **bound)
    upstream = torch.randn_like(written)
    leaves = list(given.values())
    for a, b in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (written, one)), strict=True):
        torch.testing.assert_close(a, b, **bound)


@pytest.mark.parametrize(("pattern", "formula"), CASES, ids=IDS)
def test_a_formula_is_found_and_found_once(pattern: Pattern, formula: Callable[..., Any]) -> None:
    given = values(formula, torch.float32)

    def run(*tensors: Tensor) -> Tensor:
        return called(formula, dict(zip(given, tensors, strict=True)))

    traced = make_fx(run, tracing_mode="fake", pre_dispatch=True)(*given.values())
    traced.graph.eliminate_dead_code()
    (found,) = recompose(traced.graph, PATTERNS, lambda node: (), attributes_of(traced, traced.graph))
    assert found.pattern == pattern.name
    traced.graph.lint()
    (made,) = (n for n in traced.graph.nodes if n.op == "call_function")
    assert made.target is pattern.target
    assert recompose(traced.graph, PATTERNS, lambda node: (), attributes_of(traced, traced.graph)) == ()


def test_true_is_all_but_attention_and_false_is_none() -> None:
    assert chosen(NAMES) == chosen(NAMES[::-1]) == NAMES
    wanted = ("tanh_gelu", "erf_gelu", "quick_gelu", "silu", "rms_norm", "layer_norm", "softmax")
    wanted += ("repeated", "loss_cast", "math_attention", "short_attention")
    wanted += ("aligned_product", "grouped_attention", "dense_mask", "tf32_product", "wide_linear")
    assert chosen(True) == wanted
    assert {*NAMES} - {*wanted} == {"attention", "masked_attention"}
    assert chosen(False) == chosen(()) == ()


@pytest.mark.parametrize(
    ("recompose", "message"),
    [
        (["tanh_gelu", "gelu"], f"there is no pattern 'gelu'; the patterns are {', '.join(NAMES)}$"),
        ("tanh_gelu", r"a sequence of names: give \('tanh_gelu',\), not 'tanh_gelu'"),
    ],
)
def test_what_is_no_choice_is_refused(recompose: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(recompose)
