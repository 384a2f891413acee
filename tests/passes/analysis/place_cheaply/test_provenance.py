"""Where float32 values come from, and what that asks of the ops that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.passes.analysis.place_cheaply import Provenance, decisive
from autocastfx.passes.analysis.units import Ports, units_of
from autocastfx.passes.decide.checks import Classifier
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from tests.decided import decided, traced
from tests.helpers import relative_error
from tests.nearness import assert_as_near_as_autocast

X, W = torch.rand(8, 8), torch.rand(8, 8)
LOW = torch.bfloat16


class Model(nn.Module):
    """A function of the inputs, the parameters and the buffers of a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.scale = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8))
        self.gain = nn.Parameter(torch.tensor(0.0137))
        self.register_buffer("held", torch.rand(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def provenance(function: Callable[[Any, Tensor], Any]) -> tuple[set[str], set[str], list[str]]:
    """The names of parameters and of values from outside, and what ``function`` gives back."""
    graph, rules, facts = traced(Model(function).eval(), X), load_op_list("bfloat16"), load_kernel_facts()
    decisions = Classifier(rules, facts, LOW, "cpu")(graph, {}).decisions
    targets = frozenset(str(n.target) for n in graph.nodes if n.op == "get_attr" and "held" not in str(n.target))
    found = Provenance.of(graph, units_of(graph, decisions, Ports(rules, facts)), targets)
    returned = [n.name for n in graph.output_node().all_input_nodes]
    return {n.name for n in found.parameters}, {n.name for n in found.outside}, returned


PARAMETERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "itself": lambda m, x: m.weight,
    "a view": lambda m, x: m.weight.view(4, 16).mT,
    "a number with a dimension": lambda m, x: m.gain.view(1, 1),
    "a number as large as a product": lambda m, x: m.gain.expand_as(x @ m.weight),
    "a choice of a number": lambda m, x: torch.where(x[0] > 0, m.gain, 0.0),
    "two joined by a choice": lambda m, x: torch.where(x > 0, m.weight, m.scale),
}
OUTSIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input": lambda m, x: x.mT.neg(),
    "a buffer": lambda m, x: m.held.mT.neg(),
    "new numbers": lambda m, x: torch.arange(8.0),
    "a cast from integers": lambda m, x: (x > 0).float(),
    "a sum with one": lambda m, x: x @ m.weight + x,
    "a chain after one": lambda m, x: ((x @ m.weight + x).tanh() * m.scale).relu(),
    "a number from outside with a dimension": lambda m, x: x[0, 0].sqrt()[None],
    "random numbers": lambda m, x: torch.rand_like(x @ m.weight),
}
NEITHER: dict[str, Callable[[Any, Tensor], Any]] = {
    "a product": lambda m, x: x @ m.weight,
    "computed from a product": lambda m, x: (x @ m.weight + m.scale).relu(),
    "computed from a parameter": lambda m, x: m.weight * 2,
    "what a deny op gives": lambda m, x: x.exp(),
    "a product and a single number from outside that scales it": lambda m, x: (x @ m.weight) * x[0, 0],
    "a product as large as an input": lambda m, x: (x[:1] @ m.weight).expand_as(x),
    "rows of a parameter": lambda m, x: functional.embedding((x[0] > 0).long(), m.weight),
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        *((f, "parameter") for f in PARAMETERS.values()),
        *((f, "outside") for f in OUTSIDE.values()),
        *((f, "neither") for f in NEITHER.values()),
    ],
    ids=[*PARAMETERS, *OUTSIDE, *NEITHER],
)
def test_where_a_value_comes_from(function: Callable[[Any, Tensor], Any], expected: str) -> None:
    parameters, outside, (made,) = provenance(function)
    assert (made in parameters, made in outside) == (expected == "parameter", expected == "outside")


def test_a_mask_added_to_scores_does_not_bring_them_from_outside() -> None:
    def scores(m: Any, x: Tensor) -> Tensor:
        return (x @ m.weight + x).softmax(-1)

    def read_otherwise(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ m.weight + x
        return y.softmax(-1), y

    assert "add" not in provenance(scores)[1]
    assert "add" in provenance(read_otherwise)[1]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, n: x @ x + n, ["matmul", "n"]),  # an addend may have digits that 16 bits lose
        (lambda x, n: (x @ x) * n, ["matmul"]),
        (lambda x, n: (x @ x) + x[0], ["matmul", "select"]),
        (lambda x, n: n.view(1, 1), ["n"]),
        (lambda x, n: torch.stack([n, (x @ x).mean()]), ["n", "mean"]),
        (lambda x, n: n.expand_as(x @ x), ["n"]),
    ],
)
def test_the_operands_that_make_a_result_float32(function: Callable[..., Any], expected: list[str]) -> None:
    graph = traced(function, X, torch.tensor(80.0))
    (made,) = graph.output_node().all_input_nodes
    ports = Ports(load_op_list("bfloat16"), load_kernel_facts())
    names = {"args_0": "x", "args_1": "n"}
    found = [names.get(n.name, n.name) for n in decisive(made, ports, set(graph.nodes))]
    assert found == expected


# -- in a conversion --------------------------------------------------------------------------------------------------


def steps(m: Any, x: Tensor) -> Tensor:
    for _ in range(48):
        x = x + 1e-3 * torch.tanh(x @ m.weight)
    return x


@pytest.mark.parametrize("fold", ["none", "exact", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_state_that_takes_small_steps_is_never_narrowed(dtype: torch.dtype, fold: Any) -> None:
    model = Model(steps)
    amp_model = autocastfx.convert(model, (X,), dtype=dtype, fold=fold)
    assert {n.dtype for n in amp_model.plan.nodes if n.op == "add"} == {"float32"}
    # Each step is rounded thrice on its way, and so is what it is computed from.
    assert relative_error(amp_model(X).detach() - X, steps(model, X).detach() - X) < 8 * torch.finfo(dtype).eps


NUMBERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "viewed": lambda m, y: m.gain.view(1, 1),
    "as large as a value": lambda m, y: m.gain.expand_as(y),
    "stacked": lambda m, y: torch.stack([m.gain] * 8),
    "joined": lambda m, y: torch.cat([m.gain[None]] * 8),
    "chosen": lambda m, y: torch.where(y[:1] == y[:1], m.gain, 0.0),
    "computed before": lambda m, y: (m.gain * 2).unsqueeze(0).flip(0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_gets_dimensions_widens_as_in_torch(name: str) -> None:
    def steps(m: Any, x: Tensor) -> Tensor:
        y = x @ m.weight
        for _ in range(24):
            y = y + NUMBERS[name](m, y) * torch.tanh(y @ m.weight)
        return y

    model = Model(steps)
    amp_model = autocastfx.convert(model, (X,), dtype=LOW)
    slack = torch.finfo(LOW).eps / 4
    assert_as_near_as_autocast(lambda m: {"output": m(X).detach()}, model, amp_model, LOW, slack=slack)


def stream(m: Any, x: Tensor) -> Tensor:
    return ((x @ m.weight) * m.scale) @ m.weight


def positions(m: Any, x: Tensor) -> Tensor:
    return (x @ m.weight + m.held) @ m.weight


@pytest.mark.parametrize(
    ("function", "node", "fold", "runs", "because"),
    [
        (stream, "mul", "none", "bfloat16", "fewest bytes moved"),
        (positions, "add", "none", "float32", "an input is float32"),
        (positions, "add", "kernel", "float32", "an input is float32"),
    ],
)
def test_a_parameter_may_be_cast_beside_a_low_operand_and_a_buffer_may_not(
    function: Callable[..., Any], node: str, fold: Any, runs: str, because: str
) -> None:
    found = decided(Model(function), X, dtype=LOW, fold=fold).plan[node]
    assert (found.dtype, str(found.placement.because)) == (runs, because)


def test_a_parameter_of_the_size_of_the_result_is_a_value() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.weight = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (self.state + (self.state @ self.weight) * 1e-3) @ x

    plan = decided(Learned(), X, dtype=LOW).plan
    assert (plan["add"].dtype, str(plan["add"].placement.because)) == ("float32", "an input is float32")


def test_under_kernel_an_activation_is_narrowed_that_was_float32_for_a_deny() -> None:
    def residual(m: Any, x: Tensor) -> Tensor:
        y = x @ m.weight
        return (y + functional.layer_norm(y @ m.weight, (8,))) @ m.weight

    runs = {f: decided(Model(residual), X, dtype=LOW, fold=f).plan["add"].dtype for f in ("none", "kernel")}  # pyright: ignore
    assert runs == {"none": "float32", "kernel": "bfloat16"}


def test_what_allow_ops_alone_read_is_moved_in_16_bits() -> None:
    def moved(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flip(0) @ m.weight, m.held.flip(0)

    plan = decided(Model(moved), X, dtype=LOW).plan
    assert (plan["flip"].dtype, plan["flip_1"].dtype) == ("bfloat16", "float32")
