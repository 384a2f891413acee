"""A comparison as text, and as JSON that reads back equal."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from autocastfx import Comparison, OpList, compare, convert
from autocastfx.plan.plan import Recomposed
from autocastfx.report.comparison import Beginning, ComparedNode, ComparedParameter, ComparedVariant, Deviation
from tests.helpers import Function


def faulty(x: Tensor, w: Tensor) -> Tensor:
    return torch.exp(x @ w) * 0


@pytest.fixture(scope="module")
def found() -> Comparison:
    torch.manual_seed(0)
    x, w = torch.full((4, 8), 2.0), torch.full((8, 8), 1.0).requires_grad_()
    listed = OpList.of({"allow": ["exp", "mul"]}, name="mine")
    amp_model = convert(Function(faulty).eval(), (x, w), op_list=["default", listed], dtype="float16")
    return compare(None, amp_model, x, w, gradients=True, scale=2.0)


def test_json_reads_back_equal_and_any_reader_takes_it(found: Comparison) -> None:
    assert Comparison.from_json(found.to_json()) == found

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not in JSON")

    data = json.loads(found.to_json(), parse_constant=refuse)
    assert data["format"] == 2
    assert data["variant"] == {
        "mode": "eval",
        "call": "args=(float32[2d], float32[2d])",
        "sizes": found.variant.sizes,
        "low": "float16",
        "device": "cpu",
        "op_list": found.variant.op_list,
    }
    assert found.variant.op_list.endswith("mine")
    assert found.variant.sizes.startswith("sizes[0][0] == 4 and ")
    assert set(data) == {
        "format",
        "nodes",
        "skipped",
        "whole",
        "parameters",
        "scale",
        "variant",
        "recomposed",
        "cancellations",
    }
    numbers = {"dtype", "error", "overflow", "underflow", "zeros", "nan"}
    assert set(data["nodes"][0]) == {
        "name",
        "op",
        "module",
        "precision",
        "inherited",
        "gradient",
        "predicted",
        "cancels",
        *numbers,
    }
    assert set(data["nodes"][0]["gradient"]) == numbers
    assert set(data["parameters"][0]) == {"name", *numbers}
    assert [node["name"] for node in data["nodes"]] == ["matmul", "exp", "mul"]
    assert data["nodes"][2]["nan"] == 1.0


def test_overflow_in_parameters_gradients_alone_is_said() -> None:
    lost, good = (ComparedParameter("float32", 0.0, share, 0.0, 0.0, 0.0, f"{share}") for share in (0.5, 0.0))
    variant = ComparedVariant("eval", "x=float32[1d]", "", "float16", "cpu", "x")
    one = Comparison((), 0, (), (good, lost), 1.0, variant)
    assert one.begins == Beginning(
        "Inf and NaN are in gradients of parameters alone: 0.5; a smaller scale avoids them", "", True
    )
    assert not one.is_finite
    said = "Inf and NaN are in gradients of parameters alone: 0.5{}; a smaller scale avoids them"
    assert said.format("") in one.table(gradients=True)
    assert said.format(" and 1 more") in Comparison((), 0, (), (lost, good, lost), 1.0, variant).table(gradients=True)
    assert "smaller scale" not in Comparison((), 0, (), (good,), 1.0, variant).table(gradients=True)


def test_infinite_errors_are_texts_in_json() -> None:
    infinite = ComparedNode("float16", math.inf, 0.0, 0.0, 0.0, 0.0, "a", "add", "", "low")
    comparison = Comparison(
        (infinite,), 0, (), (), None, ComparedVariant("eval", "x=float32[1d]", "", "float16", "cpu", "x")
    )
    assert '"error": "inf"' in comparison.to_json()
    assert Comparison.from_json(comparison.to_json()) == comparison


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"format": 1, "nodes": [{}]}', '{"format": 2, "nodes": [{}]}', "nonsense"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"format 1, and this version reads 2|not a comparison|Expecting value"):
        Comparison.from_json(text)


def test_gradients_as_text(found: Comparison) -> None:
    lines = found.table(2, gradients=True, in_order=True).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["node", "mul", "exp", "1"]
    assert lines[3] == "1 more nodes"
    assert lines[5].split() == ["parameter", "dtype", "error", "overflow", "underflow", "zeros", "nan"]
    assert lines[6].startswith("args_1")
    assert lines[-2] == "on the way back, Inf and NaN begin with the gradient of matmul (matmul) in module (root)"
    assert lines[-1] == "0 nodes that only one of the graphs has"
    assert "parameter" not in found.table()


def test_without_gradients_there_are_none() -> None:
    x = torch.randn(2, 8)
    comparison = compare(None, convert(nn.Linear(8, 8), (x,), dtype="float16"), x)
    assert (comparison.scale, comparison.parameters, comparison["linear"].gradient) == (None, (), None)
    assert (comparison.worst_gradient, comparison.first_non_finite_gradient) == (None, None)
    assert comparison.variant.mode == "train"
    assert Comparison.from_json(comparison.to_json()) == comparison


def test_what_was_recomposed_is_named_and_stored() -> None:
    made = tuple(Recomposed("tanh_gelu", f"gelu_{i}", ("mul", "tanh")) for i in range(7))
    variant = ComparedVariant("eval", "x=float32[1d]", "", "float16", "cpu", "x")
    one = Comparison((), 3, ("cond",), (), None, variant, made[:2])
    assert one.table().splitlines()[-1] == (
        "3 nodes that only one of the graphs has; recomposed: gelu_0 (the tanh_gelu of 2 nodes), gelu_1 (the tanh_gelu "
        "of 2 nodes); not looked into: cond"
    )
    assert Comparison.from_json(one.to_json()) == one
    assert "gelu_4 (the tanh_gelu of 2 nodes) and 2 more" in Comparison((), 3, (), (), None, variant, made).table()


def node(name: str, error: float, overflow: float = 0.0, gradient: float | None = None) -> ComparedNode:
    """A compared node; ``gradient`` is the share of its gradient that overflowed."""
    lost = Deviation("float32", 0.0, gradient, 0.0, 0.0, 0.0) if gradient is not None else None
    return ComparedNode("float32", error, overflow, 0.0, 0.0, 0.0, name, "op", "", "low", 0.0, lost)


@pytest.mark.parametrize(
    ("nodes", "says", "name", "is_failure"),
    [
        ((node("a", 0.0),), "", "", False),
        ((node("a", 0.0), node("b", 0.5)), "the error begins at b (op) in module (root): 5.00e-01", "b", False),
        ((node("a", 0.5), node("b", 0.0, 0.5)), "Inf and NaN begin at b (op) in module (root)", "b", True),
        (
            (node("a", 0.5), node("b", 0.0, gradient=0.5)),
            "on the way back, Inf and NaN begin with the gradient",
            "b",
            True,
        ),
        ((node("a", 0.0, 0.5), node("b", 0.0, gradient=0.5)), "Inf and NaN begin at a (op)", "a", True),
    ],
)
def test_where_the_error_begins(nodes: tuple[ComparedNode, ...], says: str, name: str, is_failure: bool) -> None:
    variant = ComparedVariant("eval", "x=float32[1d]", "", "float16", "cpu", "x")
    begins = Comparison(nodes, 0, (), (), None, variant).begins
    assert begins.says.startswith(says)
    assert (begins.node, begins.is_failure, bool(begins.says)) == (name, is_failure, bool(says))
