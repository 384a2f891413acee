"""Planted faults are found, by name, and the op list that the report proposes mends them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, fx, nn

from autocastfx import AmpModule, OpList, convert, find_overflow
from autocastfx.errors import NodeError
from autocastfx.numerics.find_overflow import Overflow, _reads, _Trail
from autocastfx.numerics.paired_run import Step
from tests.helpers import Function, unchecked
from tests.numerics.faults import OVERFLOWS, Fault, Inside, refused

LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def planted(model: nn.Module, *inputs: Any, data: dict[str, Any]) -> AmpModule:
    return convert(model, inputs, op_list=["default", OpList.of(data)], dtype="float16")


@pytest.mark.parametrize("fault", OVERFLOWS, ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["root", "module"])
def test_a_fault_is_named_and_the_proposed_list_mends_it(fault: Fault, inside: bool) -> None:
    model = Inside(fault.function).eval() if inside else Function(fault.function)
    x = torch.randn(4, 8)
    found = find_overflow(planted(model, x, data=fault.listed), x)
    assert found is not None
    assert (found.name, found.dtype, found.precision) == (fault.node, "float16", "low")
    assert found.module == ("inner" if inside else "")
    assert found.infinite + found.nans > 0
    assert found.in_float32 is False
    assert found.inputs
    lists = ["default", OpList.of(fault.listed), found.op_list]
    assert find_overflow(convert(model, (x,), op_list=lists, dtype="float16"), x) is None


def test_a_kernel_that_takes_no_16_bits_is_named() -> None:
    x = torch.randn(4, 8)
    amp_model = planted(Inside(refused).eval(), x, data={"allow": ["faults::exact"]})
    with pytest.raises(NodeError) as raised:
        find_overflow(amp_model, x)
    said = str(raised.value)
    assert said.startswith("exact (faults::exact) in module inner raised RuntimeError: exact takes float32 alone. ")
    assert "It runs in 16 bits: its category is allow, no reason given (OpList:allow[0])." in said
    fix = OpList.of(yaml.safe_load(said.partition("add this to your op list:\n")[2]))
    assert find_overflow(convert(Inside(refused).eval(), (x,), op_list=["default", fix], dtype="float16"), x) is None


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scaled = x * 20
        return torch.exp(scaled)


def test_the_report() -> None:
    x = torch.full((2, 8), 0.7)
    found = find_overflow(planted(Exponential(), x, data={"allow": ["exp"]}), x)
    line = Exponential.forward.__code__.co_firstlineno + 2
    assert str(found).splitlines() == [
        "exp (exp) in module (root) gives 16 Inf in float16.",
        f"  line: {__file__}:{line}: return torch.exp(scaled)",
        "  reads mul_float16: float16, 14 to 14",
        "  runs in 16 bits: its category is allow, no reason given (OpList:allow[0])",
        "  what to do: add this to your op list:",
        "    deny: [exp]",
    ]


@pytest.mark.parametrize(("number", "too"), [(-1e38, False), (-LARGEST, True)])
def test_masks_that_are_added(number: float, too: bool) -> None:
    def masked(x: Tensor, first: Tensor, second: Tensor) -> Tensor:  # two would not leave the range: casts saturate
        return torch.softmax(x + (first + second + first), -1)

    mask = torch.zeros(4, 8)
    mask[:, 4:] = number
    x = torch.randn(4, 8)
    found = find_overflow(planted(Function(masked), x, mask, mask, data={"allow": ["add"]}), x, mask, mask)
    assert found is not None
    assert (found.name, found.infinite, found.in_float32) == ("add_1", 16, too)
    assert (found.fix == "") is too
    assert ("precision is not the cause" in str(found)) is too


def test_a_fault_of_precision_comes_before_one_of_the_model() -> None:
    def both(x: Tensor) -> Tensor:
        return torch.log(x * 0).exp() + torch.exp(x.abs() * 20 + 12)

    x = torch.randn(4, 8)
    found = find_overflow(convert(Function(both), (x,), dtype="float16"), x)
    assert found is not None
    assert (found.name, found.in_float32) == ("log", True)
    found = find_overflow(planted(Function(both), x, data={"modules": [_LOW_EXP]}), x)
    assert found is not None
    assert (found.name, found.in_float32) == ("exp_1", False)


_LOW_EXP = {"path": "**", "ops": ["exp"], "category": "low"}


def test_a_cast_that_overflows_names_its_readers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(torch.exp(x))

    x = torch.full((2, 8), 12.0)
    found = find_overflow(convert(Large(), (x,), dtype="float16"), x)
    assert found is not None
    assert found.op == "cast to float16"
    assert found.because == "the conversion casts exp for linear"
    assert "return self.layers(torch.exp(x))" in found.line
    rules = [f'  - {{path: "layers.{i}", category: float32, ops: [linear]}}' for i in range(2)]
    assert found.fix.splitlines() == ["modules:", *rules]  # what the first gives is beyond the range as well
    assert found.op_list is not None
    reasons = {str(rule.reason) for rule in found.op_list.lines.values()}
    assert reasons == {f"find_overflow: {found.headline.removesuffix('.')}"}
    mended = convert(Large(), (x,), op_list=["default", found.op_list], dtype="float16")
    assert find_overflow(mended, x) is None


def test_a_divisor_that_vanished_before_it_was_cast_is_mended_where_it_vanished() -> None:
    def divided(x: Tensor, w: Tensor) -> Tensor:
        return torch.reciprocal(x @ w)

    x, w = torch.full((8, 8), 2.0**-14), torch.full((8, 8), 2.0**-14)  # sums of 2**-25, which is 0 in float16
    listed = OpList.of({"allow": ["matmul"], "deny": ["reciprocal"]})
    found = find_overflow(convert(Function(divided), (x, w), op_list=listed, dtype="float16"), x, w)
    assert found is not None
    assert (found.name, found.precision, found.in_float32) == ("reciprocal", "float32", False)
    assert found.fix == "deny: [matmul]\n"


def test_what_has_no_elements_has_no_range() -> None:
    def joined(x: Tensor, cache: Tensor) -> Tensor:
        return torch.exp(torch.cat([cache, x * 20]))

    x, cache = torch.full((2, 8), 0.7), torch.empty(0, 8)
    found = find_overflow(planted(Function(joined), x, cache, data={"allow": ["cat", "exp"]}), x, cache)
    assert found is not None
    assert (found.name, [one.highest for one in found.inputs]) == ("exp", [14.0])


def test_infinite_on_purpose_is_no_fault() -> None:
    def attention(x: Tensor, mask: Tensor, extra: Tensor) -> Tensor:
        scores = (x @ x.t()).masked_fill(mask, float("-inf"))
        filled = torch.full_like(scores, float("-inf"))
        return torch.softmax(torch.where(mask, filled, scores) + extra, -1) @ x

    x, mask = torch.randn(4, 4), torch.ones(4, 4).triu(1).bool()
    extra = torch.zeros(4, 4).masked_fill(mask, float("-inf"))
    amp_model = convert(Function(attention), (x, mask, extra), dtype="float16")
    assert find_overflow(amp_model, x, mask, extra) is None
    assert find_overflow(pickle.loads(pickle.dumps(convert(nn.Linear(4, 4), (x,), dtype="float16"))), x) is None


def masked_by_logarithm(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x @ x.t() + torch.log(mask), -1) @ x


@unchecked
def test_a_mask_that_softmax_takes_is_a_note_and_not_true() -> None:
    x, mask = torch.randn(4, 4), torch.ones(4, 4).tril()
    found = find_overflow(convert(Function(masked_by_logarithm), (x, mask)), x, mask)
    assert found is not None
    assert not found
    assert (found.name, found.in_float32, found.is_fault, found.fix, found.op_list) == ("log", True, False, "", None)
    assert str(found).startswith("no fault: log (log) in module (root) gives 6 Inf in float32.")
    assert "precision is not the cause: float32 gives it here too, and it reaches no output of the model." in str(found)
    mask[1] = 0  # a row without any key: NaN reaches the output
    found = find_overflow(convert(Function(masked_by_logarithm), (x, mask)), x, mask)
    assert found
    assert found.name == "log"
    assert str(found).startswith("log (log) in module (root) gives 8 Inf in float32.")


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(torch.log(x), -1), torch.log2(x - x)


def test_of_two_in_float32_the_one_that_reaches_an_output_is_the_fault() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0]])
    for weights in ("cast", "low"):
        amp_model = convert(Function(two).eval(), (x,), weights=weights)
        found = find_overflow(amp_model, x)
        assert found
        assert found.name == "log2"


def test_without_the_float32_graph_what_reaches_no_output_is_a_note() -> None:
    x, mask = torch.randn(4, 4), torch.ones(4, 4).tril()
    amp_model = convert(Function(masked_by_logarithm).eval(), (x, mask), weights="low")
    found = find_overflow(amp_model, x, mask)
    assert found is not None
    assert not found
    assert "nothing: it reaches no output of the model." in str(found)


def test_an_overflow_beside_a_mask_is_found_and_what_carries_it_on_is_not() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        scores = (x + mask) * 100  # reads -inf, and makes another Inf
        return scores * 2

    x = torch.full((2, 4), 400.0)
    mask = torch.tensor([0.0, 300.0, -torch.inf, -torch.inf])
    listed = {"allow": ["add", "mul"]}
    found = find_overflow(planted(Function(masked), x, mask, data=listed), x, mask)
    assert found
    assert (found.name, found.infinite, found.in_float32) == ("mul", 6, False)
    assert found.inputs[0].lowest == -torch.inf
    assert found.fix == "deny: [mul]\n"


def test_a_cast_that_overflows_beside_another_inf_is_found() -> None:
    x = torch.full((16, 16), 12.0)
    x[0, 0] = torch.inf
    inputs = x, torch.ones(16, 16)
    found = find_overflow(convert(Function(lambda x, w: torch.exp(x) @ w), inputs, dtype="float16"), *inputs)
    assert found
    assert (found.op, found.in_float32, found.infinite) == ("cast to float16", False, 256)
    assert found.fix == "deny: [matmul]\n"


def test_what_follows_a_node_of_which_float32_is_not_known_is_not_blamed() -> None:
    graph = fx.Graph()
    unknown = graph.call_function(torch.masked_fill, (graph.placeholder("x"), None, -torch.inf))
    reader = graph.call_function(torch.neg, (unknown,))
    lost, good = torch.tensor([torch.inf]), torch.ones(1)
    trail = _Trail(has_float32=True)
    assert trail.judge(Step("unknown", unknown, lost, (_reads(good),), None, None)) == (False, None)
    assert trail.judge(Step("reader", reader, lost, (_reads(lost),), reader, good)) == (False, False)
    assert _Trail(has_float32=True).judge(Step("reader", reader, lost, (), reader, good)) == (True, False)


def test_a_clean_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(16, 8)
    amp_model = convert(model, (x,), dtype="float16")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert find_overflow(amp_model, x) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_op_that_writes_into_its_input_shows_what_it_read() -> None:
    def scaled(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(60000.0)
        return y + 1

    x = torch.ones(3)
    found = find_overflow(planted(Function(scaled), x, data={"allow": ["mul_", "mul"]}), x)
    assert isinstance(found, Overflow)
    assert (found.name, found.inputs[0].highest) == ("mul_", 2.0)
    assert torch.equal(x, torch.ones(3))


def test_without_the_float32_graph_the_cause_is_not_known() -> None:
    x = torch.ones(2, 8)
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, 30000.0)
    amp_model = convert(model.eval(), (x,), weights="low", dtype="float16")
    found = find_overflow(amp_model, x)
    assert found is not None
    assert (found.name, found.in_float32) == ("linear", None)


def test_only_converted_models() -> None:
    with pytest.raises(TypeError, match="this needs what convert\\(\\) returned, not Linear: convert the model first"):
        find_overflow(nn.Linear(2, 2), torch.ones(2))  # type: ignore[arg-type]


def test_the_line_is_the_models_own_where_the_op_is_one_of_torchs_modules() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    amp_model = convert(Outer().eval(), (torch.full((2, 8), 1e4),), dtype=torch.float16)
    with torch.no_grad():
        amp_model.get_parameter("fc.weight").fill_(1e3)
    found = find_overflow(amp_model, torch.full((2, 8), 1e4))
    assert found is not None
    assert found.line == f"{__file__}:{Outer.forward.__code__.co_firstlineno + 1}: return self.fc(x)"
