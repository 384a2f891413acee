"""One search proposes what makes a model finite: also what overflows only once the first overflow is mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from autocastfx import AmpModule, OpList, convert, find_overflow
from autocastfx.numerics.find_overflow import Overflow
from tests.helpers import Function, relative_error
from tests.numerics.faults import exact
from tests.numerics.handwritten import LISTED, NORMALIZED, RMS_NORMS, Blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore::autocastfx.errors.UncheckedWarning"),
    pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning"),  # one list for all ways to write it
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def planted(model: nn.Module, *inputs: Any, data: dict[str, Any] = LISTED, fix: str = "", **how: Any) -> AmpModule:
    lists = ["default", OpList.of(data), *([OpList.of(yaml.safe_load(fix))] if fix else [])]
    return convert(model, inputs, op_list=lists, dtype="float16", **how)


def mended(model: nn.Module, *inputs: Any, data: dict[str, Any] = LISTED, **how: Any) -> Overflow:
    """Convert a model, search once, and see that the proposed list makes it finite, and as exact as float16 is."""
    found = find_overflow(planted(model, *inputs, data=data, **how), *inputs)
    assert found
    again = planted(model, *inputs, data=data, fix=found.fix, **how)
    assert not find_overflow(again, *inputs)
    with torch.no_grad():
        given, expected = again(*inputs), model(*inputs)
    assert bool(given.isfinite().all())
    assert relative_error(given, expected) < 0.01
    assert (found.no_list_helps, found.stopped) == ((), "")
    return found


@pytest.mark.parametrize("norm", RMS_NORMS, ids=lambda norm: norm.__name__)
def test_nine_norms_by_hand_are_mended_at_once(norm: Callable[[Tensor], Tensor]) -> None:
    found = mended(Blocks(norm, 9).eval(), torch.randn(4, 16) * 1000, recompose=False)
    modules = yaml.safe_load(found.fix)["modules"]
    assert [rule["path"] for rule in modules] == [f"blocks.{i}.norm" for i in range(9)]
    assert len({tuple(rule["ops"]) for rule in modules[1:]}) == 1  # in the first, a forced rule widens the div
    assert found.name.startswith(modules[0]["ops"][0])


@pytest.mark.parametrize("inside", [False, True], ids=["root", "module"])
@pytest.mark.parametrize("norm", NORMALIZED, ids=lambda norm: norm.__name__)
def test_what_else_is_written_by_hand_is_mended_at_once(norm: Callable[[Tensor], Tensor], inside: bool) -> None:
    model = Blocks(norm, 2).eval() if inside else Function(norm)
    assert mended(model, torch.randn(4, 16) * 300 + 300, recompose=False).more


class _Normalized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_the_report_names_the_first_and_counts_the_others() -> None:
    found = mended(_Normalized(), torch.full((2, 16), 1000.0), recompose=False)
    assert (found.name, found.more) == ("pow_1", ("mean", "add", "rsqrt"))
    assert str(found).splitlines() == [
        "pow_1 (pow) in module (root) gives 32 Inf in float16.",
        f"  line: {__file__}:{_Normalized.forward.__code__.co_firstlineno + 1}: "
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "  reads x_float16: float16, 1000 to 1000",
        "  runs in 16 bits: its category is allow, no reason given (OpList:allow[0])",
        "  and 3 more, once that is mended: mean, add, rsqrt",
        "  what to do: add this to your op list:",
        "    deny: [pow, mean, add, rsqrt]",
    ]


def test_what_follows_a_deny_op_is_not_listed_itself() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x / (x.square().reshape(-1, 2, 8).sum(-1) * 2).sum(-1, keepdim=True).sqrt()

    listed = {"allow": ["square", "sum", "sqrt"], "reduction_depth": None}
    found = mended(Function(scaled), torch.randn(4, 16) * 1000, data=listed)
    assert yaml.safe_load(found.fix) == {"deny": ["square", "sum", "sqrt"]}  # neither reshape nor mul


def test_a_value_that_vanished_is_followed_too() -> None:
    def inverse(x: Tensor) -> Tensor:
        y = (x * 1e-4).square()
        return torch.rsqrt(y.mean(-1, keepdim=True)) * (1 / y.sum(-1, keepdim=True)).sqrt()

    mended(Function(inverse), torch.rand(4, 16) + 0.5)


def exponential(x: Tensor) -> Tensor:
    return torch.exp(x)


def test_a_cast_that_overflows_is_followed() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).eval()
    model = nn.Sequential(Function(exponential), layers)
    found = mended(model, torch.full((2, 8), 14.0), data={"allow": ["linear"]})
    assert found.op == "cast to float16"
    assert found.more == ("linear_1", "linear_2")


def test_an_operator_that_stands_for_several_nodes_is_run_in_float32() -> None:
    def norm(x: Tensor) -> Tensor:
        y = x.square()
        return torch.sin(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

    model = nn.Sequential(nn.Linear(16, 16), Function(norm), nn.Linear(16, 16)).eval()
    data = {"allow": ["square", "sin"], "modules": [{"path": "**", "ops": ["rms_norm"], "category": "low"}]}
    amp_model = planted(model, x := torch.randn(4, 16) * 1000, data=data)
    assert [one.pattern for one in amp_model.plan.recomposed] == ["rms_norm"]
    found = mended(model, x, data=data)
    assert (found.name, len(found.more)) == ("square", 1)  # the norm; what it gives is in the range, so sin may stay
    assert yaml.safe_load(found.fix) == {
        "modules": [{"path": "1", "category": "float32", "ops": ["square", "rms_norm"]}]
    }


def test_what_no_list_helps_is_told() -> None:
    found = Overflow(
        *("exp", "exp", "", "float16", "low", 2, 0, (), "", "so", False, "deny: [exp]\n", "add this:"),
        more=("softmax", *(f"mul_{i}" for i in range(6))),
        no_list_helps=("softmax",),
        stopped="index raised IndexError",
    )
    assert str(found).splitlines()[2:5] == [
        "  and 7 more, once that is mended: softmax, mul_0, mul_1, mul_2, mul_3, …",
        '  no list helps softmax: convert(fold="none"), scale the values in the model, or convert to torch.bfloat16.',
        "  the search for more ended: index raised IndexError",
    ]


def refused_behind(x: Tensor) -> Tensor:
    return exact(torch.exp(x * 20))


def test_a_node_that_raises_behind_the_first_ends_the_search_and_is_told() -> None:
    x = torch.full((2, 8), 0.7)
    amp_model = planted(Function(refused_behind), x, data={"allow": ["exp", "faults::exact"]})
    found = find_overflow(amp_model, x)
    assert found
    assert found.name == "exp"
    assert found.stopped.startswith("exact (faults::exact) in module (root) raised RuntimeError: exact takes float32")
    assert "  the search for more ended: exact" in str(found)


def test_memory_that_several_nodes_read_is_mended_for_all() -> None:
    def divided(x: Tensor) -> Tensor:
        y = x * 1e-3
        same = y.view(-1)
        y.div_((x * 1e-3).square())  # which vanished
        return torch.sqrt(same)

    listed = {"allow": ["mul", "div_", "square", "sqrt"]}
    x = torch.full((3,), 0.1)
    found = mended(Function(divided), x, data=listed)
    assert found.op == "div_"
    assert yaml.safe_load(found.fix) == {"deny": ["square"]}  # sqrt reads the same memory
    assert torch.equal(x, torch.full((3,), 0.1))


def squares(x: Tensor) -> Tensor:
    return (x * x).mean(-1)


def test_without_the_float32_graph_the_first_alone_is_proposed() -> None:
    x = torch.full((2, 16), 1000.0)
    amp_model = planted(Function(squares).eval(), x, weights="low")
    found = find_overflow(amp_model, x)
    assert found
    assert (found.in_float32, found.fix, found.more) == (None, "deny: [mul]\n", ())
