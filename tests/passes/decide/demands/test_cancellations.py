"""Differences of averages of products and products of averages, and stencils, run in float32 up to the last layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import OpList
from tests.decided import decided
from tests.nearness import assert_as_near_as_autocast, trained_on

X = torch.rand(2, 1, 12, 12)


class Measured(nn.Module):
    def __init__(self, measure: Callable[[Measured, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.measure = nn.Conv2d(1, 3, 3), measure
        self.register_buffer("window", torch.full((3, 1, 3, 3), 1 / 9))
        self.register_buffer("edge", torch.tensor([[[[0.25, 0.5, 0.25]]]]).expand(3, 1, 1, 3))
        self.register_buffer("laplacian", torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]).expand(3, 1, 3, 3))
        self.fixed = nn.Conv2d(3, 3, 3, groups=3, bias=False).requires_grad_(False)
        self.fixed.weight.copy_(self.laplacian)

    def forward(self, x: Tensor) -> Tensor:
        return self.measure(self, self.layer(x))


def low(measure: Callable[[Measured, Tensor], Tensor]) -> set[str]:
    plan = decided(Measured(measure), X, dtype="bfloat16").plan
    return {n.name for n in plan.nodes if n.dtype == "bfloat16"}


def windowed(model: Measured, y: Tensor) -> Tensor:
    return F.conv2d(y, model.window, groups=3)


CANCELLING: dict[str, Callable[[Measured, Tensor], Tensor]] = {
    "a variance": lambda m, y: windowed(m, y * y) - windowed(m, y).pow(2),
    "a covariance": lambda m, y: windowed(m, y * y[:1]) - windowed(m, y) * windowed(m, y[:1].expand_as(y)),
    "the other way round": lambda m, y: F.avg_pool2d(y, 3).square() - F.avg_pool2d(y**2, 3),
    "a factor on one side": lambda m, y: F.conv2d(y * y, m.window, groups=3) - 0.5 * windowed(m, y) * windowed(m, y),
    "of further terms": lambda m, y: windowed(m, y * y) + 1e-3 - windowed(m, y).square(),
    "a window that is made": lambda m, y: (
        (w := torch.ones(3, 1, 3, 3) / 9).sum() + (F.conv2d(y * y, w, groups=3) - F.conv2d(y, w, groups=3) ** 2)
    ),
    "averages of a stack": lambda m, y: (
        (parts := windowed(m, torch.cat([y, y * y])).split(y.shape[0]))[1] - parts[0].square()
    ),
    "averages of joined channels": lambda m, y: (
        (parts := F.avg_pool2d(torch.cat([y * y.tanh(), y, y.tanh()], 1), 2).chunk(3, 1))[0] - parts[1] * parts[2]
    ),
    "averages of a stack, unbound": lambda m, y: (
        (parts := (torch.stack([y, y.square()]) @ torch.full((10, 2), 0.1)).unbind())[1] - parts[0].pow(2)
    ),
    "a value less its average": lambda m, y: y - F.conv2d(F.pad(y, (1, 1, 1, 1)), m.window, groups=3),
    "an average less its value": lambda m, y: windowed(m, y) + 1 - y[..., 1:-1, 1:-1],
    "an average of an average": lambda m, y: (p := F.avg_pool2d(y, 2))[..., 1:-1, 1:-1] - windowed(m, p),
    "a difference of averages": lambda m, y: windowed(m, y)[..., :-2] - F.conv2d(y, m.edge, groups=3)[..., 2:, :-2],
    "an average by two products": lambda m, y: (
        y - F.conv2d(F.conv2d(y, m.edge, padding=(0, 1), groups=3), m.edge.mT, padding=(1, 0), groups=3)
    ),
    "second differences": lambda m, y: y[..., 2:] - 2 * y[..., 1:-1] + y[..., :-2],
    "five points": lambda m, y: -y + (y.roll(1, 2) + y.roll(-1, 2) + y.roll(1, 3) + y.roll(-1, 3)) / 4,
    "a difference of differences": lambda m, y: (d := y[..., 1:] - y[..., :-1])[..., 1:] - d[..., :-1],
    "a stencil": lambda m, y: F.conv2d(y, m.laplacian, groups=3),
    "a stencil, behind a view": lambda m, y: F.conv2d(y, m.laplacian[:1].repeat(3, 1, 1, 1), groups=3),
    "a stencil in a layer that is not trained": lambda m, y: m.fixed(y),
    "written by rsub": lambda m, y: torch.rsub(windowed(m, y).square(), windowed(m, y * y)),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_what_cancels_runs_in_float32_up_to_the_last_layer(name: str) -> None:
    assert low(CANCELLING[name]) == {"conv2d"}


ORDINARY: dict[str, Callable[[Measured, Tensor], Tensor]] = {
    "windows": lambda m, y: windowed(m, y) - windowed(m, y.tanh()),
    "a gate": lambda m, y: windowed(m, y * y.tanh()) - windowed(m, y) * windowed(m, y.sigmoid()),
    "an average and a square of another": lambda m, y: windowed(m, y.tanh() * y.sigmoid()) - y[..., 1:-1, 1:-1].tanh(),
    "other parts of a stack": lambda m, y: (
        (parts := windowed(m, torch.cat([y.tanh(), y.tanh() * y.sigmoid()])).split(y.shape[0]))[1] - parts[0].square()
    ),
    "a value less another's average": lambda m, y: windowed(m, y.tanh()) - y[..., 1:-1, 1:-1].sigmoid(),
    "what a list gives": lambda m, y: (
        windowed(m, y * y.tanh()) - (b := torch.broadcast_tensors(y[..., 1:-1, 1:-1], y[:1, :1, 1:-1, 1:-1]))[0] * b[1]
    ),
    "a layer": lambda m, y: F.conv2d(y * y.tanh(), m.layer.weight.expand(3, 3, 3, 3)) - y[..., 1:-1, 1:-1],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_other_differences_keep_their_products(name: str) -> None:
    assert len({n for n in low(ORDINARY[name]) if n.startswith("conv2d")}) > 1


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "first differences": lambda y: y[..., 1:] - y[..., :-1],
    "a straight-through value": lambda y: y + (y.sigmoid() - y).detach(),
    "weights that do not cancel": lambda y: y[..., 2:] - y[..., 1:-1] + y[..., :-2],
    "other values": lambda y: y[..., 2:] - 2 * y[..., 1:-1].tanh() + y[..., :-2],
}


@pytest.mark.parametrize("name", SUMS)
def test_other_sums_of_a_value_keep_their_precision(name: str) -> None:
    assert low(lambda _, y: SUMS[name](y)) > {"conv2d", "sub"}


def test_what_is_added_to_a_difference_keeps_its_precision() -> None:
    def added(m: Measured, y: Tensor) -> Tensor:
        return CANCELLING["second differences"](m, y) + y.tanh() @ y[..., 2:]

    assert low(added) == {"conv2d", "tanh", "matmul"}


def test_the_reason_tells_what_cancels() -> None:
    plan = decided(Measured(CANCELLING["a variance"]), X, dtype="bfloat16").plan
    assert plan["sub"].decision.reason.startswith("a difference of an average of products")
    assert plan["sub"].decision.source == "forced:cancellation"
    plan = decided(Measured(CANCELLING["a stencil"]), X, dtype="bfloat16").plan
    assert plan["conv2d_1"].decision.reason == "the weights of laplacian add up to zero: a difference of neighbours"


def test_a_persons_rule_for_the_op_goes_first() -> None:
    mine = autocastfx.OpList.of({"infer": ["sub"]}, name="mine")
    model = Measured(CANCELLING["a variance"])
    plan = decided(model, X, dtype="bfloat16", op_list=["default", mine]).plan
    assert plan["sub"].decision.source != "forced:cancellation"


QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "1 / b": lambda a, b: a * (1.0 / b),
    "reciprocal": lambda a, b: b.reciprocal() * a,
    "power": lambda a, b: a * b**-1,
    "as large as the other": lambda a, b: (1 / b).expand_as(a) * a,
    "a multiple": lambda a, b: a * (2 / b)[:, :, None].squeeze(-1),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_product_with_an_inverse_is_a_quotient(name: str) -> None:
    """A sum of products that divides, and what it divides, may leave float16's range."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).sigmoid().chunk(3, -1)
            return QUOTIENTS[name](q @ (k.mT @ v), q @ k.sum(1, keepdim=True).mT)

    plan = decided(Divided(), torch.rand(2, 9, 8), dtype="float16").plan
    assert {n.name for n in plan.nodes if n.dtype == "float16"} == {"linear"}


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum of three": lambda q, c, b: torch.einsum("bnd,bde,bn->bne", q, c, 1.0 / b),
    "einsum of two": lambda q, c, b: torch.einsum("bne,bn->bne", q @ c, b**-1),
    "matmul of a view": lambda q, c, b: torch.bmm((1 / b)[:, None], q @ c),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_matrix_product_with_an_inverse_is_a_quotient(name: str) -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).sigmoid().chunk(3, -1)
            return self.out(PRODUCTS[name](q, k.mT @ v, torch.einsum("bnd,bd->bn", q, k.sum(1))))

    plan = decided(Divided(), torch.rand(2, 9, 8), dtype="float16").plan
    assert {n.name for n in plan.nodes if n.dtype == "float16"} == {"linear", "linear_1"}


def test_a_list_of_ones_own_that_allows_the_difference_wins() -> None:
    def variance(x: Tensor) -> Tensor:
        x = x @ x
        return (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()) @ x[:1]

    allowed = OpList.of({"allow": ["square", "mean", "sub"]})
    for lists, run in (("default", "float32"), (["default", allowed], "bfloat16")):
        plan = decided(variance, torch.randn(16, 16), dtype="bfloat16", op_list=lists).plan
        assert plan["sub"].dtype == run


class Centred(nn.Module):
    """What a function makes of values around a number, and of a parameter that holds it, for a layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], centre: Tensor, value: float = 10.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(32, 32), nn.Linear(32, 4), function
        self.centre = nn.Parameter(centre)
        with torch.no_grad():
            self.first.bias.add_(value)
            self.last.weight.abs_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.centre))


ROWS, CENTRE = torch.randn(256, 32, generator=torch.Generator().manual_seed(0)), torch.full((32,), 10.2)
OFFSETS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "a difference": (lambda y, c: y - c, CENTRE),
    "the other way round": (lambda y, c: c - y, CENTRE),
    "a negative multiple": (lambda y, c: torch.add(y, c, alpha=-1), CENTRE),
    "a centre as large": (lambda y, c: y - c.expand_as(y), CENTRE),
    "two centres": (lambda y, c: (y[:, None] - c).sum(1), CENTRE.repeat(2, 1)),
    "one number": (lambda y, c: F.relu(y - c), torch.tensor(10.2)),
    "what is 0 as yet": (lambda y, c: y - c, torch.zeros(32)),
    "a sum with a large one": (lambda y, c: y + c, -CENTRE),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_values_less_a_parameter_are_float32(name: str) -> None:
    function, centre = OFFSETS[name]
    plan = decided(Centred(function, centre), ROWS, dtype="bfloat16").plan
    assert {node.dtype for node in plan.nodes if "centre" in node.decision.reason} == {"float32"}
    assert plan["linear"].dtype == plan["linear_1"].dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_less_a_parameter_are_as_exact_as_under_torch_autocast(dtype: torch.dtype) -> None:
    model = Centred(lambda y, c: F.relu(y) - c, CENTRE)
    amp_model = autocastfx.convert(model, (ROWS,), dtype=dtype)
    assert_as_near_as_autocast(trained_on(ROWS), model, amp_model, dtype)


def test_a_parameter_that_is_near_0_is_added_in_16_bits() -> None:
    model = Centred(lambda y, c: y + c, CENTRE / 100)
    assert decided(model, ROWS, dtype="bfloat16").plan["add"].dtype == "bfloat16"


def test_calibration_tells_whether_a_parameter_is_far_from_0() -> None:
    """Beside values that spread as far as the centre, its rounding is none that counts."""
    for value, run in ((10.2, "float32"), (1000.0, "bfloat16")):
        model = Centred(lambda y, c: y - c, CENTRE, value)
        plan = autocastfx.convert(model, (ROWS,), dtype="bfloat16", calibrate=[ROWS]).plan
        assert plan["sub"].dtype == run


def test_with_fold_kernel_a_large_parameter_is_added_in_16_bits_and_none_is_subtracted() -> None:
    for function, op, run in ((lambda y, c: y + c, "add", "bfloat16"), (lambda y, c: y - c, "sub", "float32")):
        plan = decided(Centred(function, CENTRE), ROWS, dtype="bfloat16", fold="kernel").plan
        assert plan[op].dtype == run
