"""Ops that cannot use a rounded operand run in float32, and so does what leads to them: as far as the list says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.plan.plan import Precision
from tests.decided import decided
from tests.helpers import Function, op_list, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")

LOW = torch.bfloat16
X, W = torch.rand(8, 8), torch.rand(8, 8)
LIST = """
    unlisted: keep
    allow: [matmul]
    infer: [add, sub, mul, div, tanh, sin]
    clear: [relu, transpose, view]
    promote: [floor]
    demands:
"""


def plan_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> autocastfx.Plan:
    return decided(function, *(inputs or (X, W)), **{"dtype": LOW, **options}).plan


@pytest.fixture
def demanded(tmp_path: Path) -> Callable[..., autocastfx.Plan]:
    def plan(entry: str, function: Callable[..., Any]) -> autocastfx.Plan:
        return plan_of(function, op_list=op_list(tmp_path, f"{LIST}      - {entry}\n"))

    return plan


def low(plan: autocastfx.Plan) -> set[str]:
    return {n.name for n in plan.nodes if n.dtype == "bfloat16"}


def wave(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).relu() * 3).sin() @ w


def test_free_ops_that_lead_to_it_are_float32_and_say_why(demanded: Callable[..., autocastfx.Plan]) -> None:
    plan = demanded("{ops: [sin], reason: an angle}", wave)
    assert low(plan) == {"matmul", "matmul_1"}
    assert plan["sin"].decision.reason == "an angle"
    assert plan["mul"].decision.reason == plan["relu"].decision.reason == "leads to sin: an angle"
    for name in ("sin", "mul", "relu"):
        assert str(plan[name].decision.category) == "deny"
        assert str(plan[name].decision.source).endswith("test.yaml:8:12")


def test_without_a_demand_they_follow_the_product(tmp_path: Path) -> None:
    without = op_list(tmp_path, LIST.replace("demands:", ""))
    assert low(plan_of(wave, op_list=without)) == {"matmul", "relu", "mul", "sin", "matmul_1"}


def test_a_later_list_lifts_a_demand(tmp_path: Path) -> None:
    first = op_list(tmp_path, f"{LIST}      - {{ops: [sin]}}\n")
    lifted = first | autocastfx.OpList.of({"demands": [{"ops": ["sin"], "through": "nothing"}]})
    assert "sin" in low(plan_of(wave, op_list=lifted))


def test_what_an_allow_op_reads_too_stays_as_it_is(demanded: Callable[..., autocastfx.Plan]) -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w).tanh()
        return y.sin(), y.transpose(0, 1) @ w

    assert str(demanded("{ops: [sin]}", both)["tanh"].decision.category) == "infer"
    assert str(demanded("{ops: [sin], through: products}", both)["tanh"].decision.category) == "deny"


def test_only_the_arguments_that_it_names(demanded: Callable[..., autocastfx.Plan]) -> None:
    def ratio(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh() / ((w @ x) + 2)

    plan = demanded("{ops: [div], arguments: [other]}", ratio)
    assert "tanh" in low(plan)
    assert plan["add"].decision.reason == "leads to div: "


@pytest.mark.parametrize(
    ("divisor", "is_demanded"),
    [
        (lambda y: y - 1, True),
        (lambda y: (y - 1).relu() * 2, True),
        (lambda y: y + 1, False),
        (lambda y: (y - 1) + y, False),  # a sum of two: no scaled difference
        (lambda y: (y - 1).exp(), False),
    ],
)
def test_only_what_one_of_some_ops_made(
    divisor: Callable[[Tensor], Tensor], is_demanded: bool, demanded: Callable[..., autocastfx.Plan]
) -> None:
    def ratio(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) / divisor(w @ x)) @ w

    plan = demanded("{ops: [div], of: [sub], arguments: [other], reason: a difference}", ratio)
    assert (plan["div"].decision.reason == "a difference") is is_demanded


def test_of_one_argument_and_asked_of_all(demanded: Callable[..., autocastfx.Plan]) -> None:
    def ratio(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh() / ((w @ x) - 1)) @ w

    for demand in ("{ops: [div], of: [sub], at: [other]}", "{ops: [div], of: [sub]}"):  # one such operand will do
        assert low(demanded(demand, ratio)) == {"matmul", "matmul_1", "matmul_2"}
    plan = demanded("{ops: [div], of: [sub], at: [self]}", ratio)
    assert {"tanh", "sub", "div"} <= low(plan)


class Gram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return torch.linalg.inv((y.mT @ y) + torch.eye(8)) @ y.mT


def test_through_products_of_values_and_no_layer() -> None:
    plan = decided(Gram(), X, dtype=LOW).plan
    assert plan["matmul"].dtype == "bfloat16"
    assert plan["matmul_1"].dtype == "float32"
    assert plan["matmul_1"].decision.reason.startswith("leads to linalg_inv: linear algebra is as exact as")


def test_both_ways_reaches_the_products_that_read_the_result() -> None:
    amp_model = decided(Gram(), X, dtype=LOW)
    after = amp_model.plan["matmul_2"]
    assert after.dtype == "float32"
    assert after.decision.reason.startswith("follows it: linear algebra is as exact as")


def test_a_number_that_16_bits_round_away_asks_for_exact_operands() -> None:
    plan = plan_of(lambda x, w: ((x @ w).tanh() * 2 + 1e-42) @ w)
    assert plan["add"].decision.source == "forced:epsilon"
    assert plan["tanh"].decision.reason == f"leads to add: {plan['add'].decision.reason}"
    assert plan["tanh"].decision.source == "forced:epsilon"
    assert plan["mul"].dtype == "float32"


def _at_once(y: Tensor) -> Tensor:
    return y * 2


def _in_place(y: Tensor) -> Tensor:
    return (y * 2).add_(1)


def _into_a_part(y: Tensor) -> Tensor:
    made = torch.zeros_like(y)
    made[0] = (y * 2)[0]
    return made


def _of_what_was_written(y: Tensor) -> Tensor:
    made = torch.zeros_like(y)
    made.copy_(y * 2)
    return made + 1


@pytest.mark.parametrize("steps", [_at_once, _in_place, _into_a_part, _of_what_was_written])
def test_what_computes_the_next_contents_of_a_buffer_asks_for_exact_operands(steps: Callable[[Tensor], Tensor]) -> None:
    """However the model writes it down: with new values, in place, or into a part of another."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ x
            self.average.lerp_(steps(y.tanh()), 0.01)
            return (x + 1) @ y

    plan = decided(Average(), X, dtype=LOW).plan
    assert plan["mul"].decision.reason == "leads to lerp_: it computes the next contents of average"
    assert plan["mul"].decision.source == "forced:update"
    assert low(plan) == {"matmul_1"}


def test_what_is_written_after_a_demanded_value_was_read_is_none_of_it(
    demanded: Callable[..., autocastfx.Plan],
) -> None:
    """Nothing that is computed for the second writing is read by the sine; the storage itself is float32."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w) * 3
        angle = y.sin()
        return angle @ w, y.copy_((x @ w).relu() * 5) @ w

    plan = demanded("{ops: [sin], reason: an angle}", function)
    assert plan["mul"].decision.reason == "leads to sin: an angle"
    assert plan["relu"].dtype == "bfloat16"


DEFAULT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "phase": (torch.sin, "leads to sin: an argument rounded to 16 bits loses its phase"),
    "pole": (torch.log, "leads to log: near its pole a rounded argument gives another order of magnitude"),
    "rounding": (torch.floor, "leads to floor: rounding to whole numbers is not continuous"),
    "index": (lambda y: torch.bucketize(y, torch.linspace(0, 1, 9)), "leads to bucketize: an index is made of it"),
}


@pytest.mark.parametrize("name", DEFAULT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_default_list_demands_for(name: str, dtype: torch.dtype) -> None:
    function, reason = DEFAULT[name]
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, Function(lambda y: function(y.sigmoid() + 1)))
    plan = decided(model, X, dtype=dtype).plan
    assert plan["linear"].dtype == str(dtype).removeprefix("torch.")
    assert plan["sigmoid"].decision.reason == plan["add"].decision.reason == reason


def test_the_phase_of_a_rotation_is_that_of_float32() -> None:
    def rotated(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * 100).sin()

    amp_model = autocastfx.convert(Function(rotated), (X, W), dtype=LOW, fold="none")
    exact = ((X.to(LOW) @ W.to(LOW)).float() * 100).sin()
    assert relative_error(amp_model(X, W), exact) < torch.finfo(torch.float32).eps


class Normalised(nn.Module):
    """Values divided by the root of their energy, which is positive for positive ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for parameter in self.layer.parameters():
            nn.init.uniform_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h / torch.sqrt(1 + (h * x).sum(-1, keepdim=True))


def test_a_sum_that_a_list_allows_is_no_product_of_values() -> None:
    """A demand through products overrules the shipped list's products, not what a person says of sums."""
    allowed = autocastfx.OpList.of({"allow": ["mul", "sum"]}, name="mine")
    plan = decided(Normalised(), torch.rand(4, 8), op_list=["default", allowed], dtype="float16").plan
    assert [plan[name].placement.run for name in ("mul", "sum_1", "sqrt")] == [
        Precision.LOW,
        Precision.LOW,
        Precision.FLOAT32,
    ]


def test_a_persons_rule_for_an_op_goes_before_the_shipped_demand() -> None:
    def wave(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin((x @ w) * 3) @ w

    assert plan_of(wave)["sin"].placement.run is Precision.FLOAT32
    mine = autocastfx.OpList.of({"infer": ["sin"]}, name="mine")
    assert plan_of(wave, op_list=["default", mine])["sin"].placement.run is Precision.LOW


def test_a_persons_rule_for_mul_is_for_its_squares_too() -> None:
    def energy(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return (y * y) @ w

    assert plan_of(energy)["mul"].placement.run is Precision.FLOAT32
    mine = autocastfx.OpList.of({"infer": ["mul"]}, name="mine")
    assert plan_of(energy, op_list=["default", mine])["mul"].placement.run is Precision.LOW
