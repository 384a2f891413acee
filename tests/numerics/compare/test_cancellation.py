"""``compare`` names the difference of nearly equal values that makes their rounding large, and what rounds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import yaml
from torch import Tensor, nn

from autocastfx import Comparison, OpList, compare, convert
from autocastfx.report.comparison import Cancellation, ComparedNode, ComparedVariant
from tests.helpers import Function

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UncheckedWarning")

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Twins(nn.Module):
    """Two convolutions that give nearly the same, and a division by what is left of their difference."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda value: value, apart: float = 1e-3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), between
        with torch.no_grad():
            for mine, other in zip(self.second.parameters(), self.first.parameters(), strict=True):
                mine.copy_(other * (1 + apart * torch.randn_like(other)))

    def forward(self, x: Tensor) -> Tensor:
        left = self.between(self.first(x)) - self.between(self.second(x))
        return left / (left.mean((2, 3), keepdim=True).square() + 1e-9)


def compared(model: nn.Module, *fixes: str, x: Tensor = X, listed: dict[str, list[str]] | None = None) -> Comparison:
    lists = [OpList.of(listed or {}), *(OpList.of(yaml.safe_load(fix)) for fix in fixes)]
    return compare(None, convert(model.eval(), (x,), dtype="bfloat16", op_list=["default", *lists]), x)


def test_the_difference_is_blamed_and_not_the_division_after_it() -> None:
    found = compared(Twins(), listed={"deny": ["sub"]})
    assert found.source is not None
    assert (found.source.name, found.source.precision, found.source.cancels) == ("div", "float32", "sub")
    (one,) = found.cancellations
    assert (one.node, one.op, one.operands, one.rounded_in) == ("sub", "sub", ("conv2d", "conv2d_1"), one.operands)
    assert (found.begins.node, found.begins.fix) == ("sub", one.fix)
    assert one.ratio > 100
    said = "cancels: sub of conv2d and conv2d_1, which are rounded to bfloat16"
    assert found.begins.says.startswith("the error begins at sub (sub) in module (root): ")
    assert found.begins.says.endswith(f" in what it reads; {said}")
    assert found.table().splitlines()[-5:-1] == [
        "  what to do: add this to your op list:",
        "    modules:",
        '      - {path: "first", category: float32, ops: [conv2d]}',
        '      - {path: "second", category: float32, ops: [conv2d]}',
    ]
    assert Comparison.from_json(found.to_json()) == found
    again = compared(Twins(), one.fix, listed={"deny": ["sub"]})
    assert again.worst is not None
    assert again.worst.error < 1e-3 * found.source.error


def test_what_only_follows_is_looked_through() -> None:
    found = compared(Twins(lambda value: value.relu().reshape(2, 8, 6, 6)))
    (one,) = found.cancellations
    assert set(one.rounded_in) == {"conv2d", "conv2d_1"}
    assert str(one) == f"cancels: sub of {' and '.join(one.operands)}, which are rounded to bfloat16 in " + ", ".join(
        one.rounded_in
    )
    assert "reshape" not in one.fix


def test_a_difference_in_16_bits_runs_in_float32_as_well() -> None:
    found = compared(Twins(), listed={"allow": ["sub"]})
    (one,) = found.cancellations
    assert one.fix.startswith("deny: [sub]\nmodules:\n")
    again = compared(Twins(), one.fix, listed={"allow": ["sub"]})
    assert again.begins.node != "sub" or again["sub"].error < 1e-3


def test_a_number_is_no_operand_that_was_rounded() -> None:
    def small(x: Tensor) -> Tensor:
        return 1 - torch.cos(x * 1e-2)

    (one,) = compared(Function(small), listed={"allow": ["rsub", "cos"]}).cancellations
    assert (one.op, one.operands, one.fix) == ("rsub", ("cos",), "deny: [rsub, cos]\n")
    assert str(one) == "cancels: rsub of cos, which is rounded to bfloat16"


def test_an_operand_that_is_an_input_is_rounded_by_the_difference_itself() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean()

    (one,) = compared(Function(centred), x=X * 0.01 + 100, listed={"allow": ["sub", "mean"]}).cancellations
    assert one.operands[1:] == ("mean",)
    assert yaml.safe_load(one.fix) == {"deny": ["sub", "mean"]}


def test_values_that_are_far_apart_or_exact_do_not_cancel() -> None:
    assert compared(Twins(apart=1.0)).cancellations == ()
    found = compared(Twins(), listed={"deny": ["conv2d"]})
    assert (found.cancellations, found.begins.fix) == ((), "")


VARIANT = ComparedVariant("eval", "x", "any", "bfloat16", "cpu", "default")
CANCELLATION = Cancellation("sub", "sub", ("a", "b"), ("a", "b"), "bfloat16", 100.0, "deny: [a]\n")


def node(
    name: str, error: float, inherited: float, precision: str, cancels: str, overflow: float = 0.0
) -> ComparedNode:
    return ComparedNode("x", error, overflow, 0.0, 0.0, 0.0, name, name, "", precision, inherited, cancels=cancels)


@pytest.mark.parametrize(
    ("last", "begins", "is_cancelled"),
    [
        (node("div", 10.0, 0.5, "float32", "sub"), "sub", True),
        (node("div", 2.0, 0.5, "low", "sub"), "sub", True),
        (node("div", 10.0, 0.5, "low", "sub"), "div", False),  # by its own rounding
        (node("div", 10.0, 0.5, "float32", ""), "div", False),
        (node("div", 0.5, 0.5, "float32", "sub", overflow=0.5), "div", True),
    ],
)
def test_an_error_of_its_own_is_not_put_down_to_what_cancelled_before(
    last: ComparedNode, begins: str, is_cancelled: bool
) -> None:
    nodes = (node("sub", 0.5, 1e-3, "float32", "sub"), last)
    found = Comparison(nodes, 0, (), (), None, VARIANT, cancellations=(CANCELLATION,)).begins
    assert (found.node, found.is_failure) == (begins, last.overflow > 0)
    assert ("cancels: sub of a and b, which are rounded to bfloat16" in found.says) is is_cancelled
    assert (found.fix != "") is is_cancelled


def test_of_many_nodes_that_rounded_a_few_are_named() -> None:
    many = Cancellation("sub", "sub", ("a",), tuple(f"linear_{i}" for i in range(7)), "bfloat16", 100.0)
    names = ", ".join(f"linear_{i}" for i in range(5))
    assert str(many) == f"cancels: sub of a, which is rounded to bfloat16 in {names}, … (7 nodes)"
