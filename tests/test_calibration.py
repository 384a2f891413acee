"""Ranges measured on batches, and what a conversion makes of them."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList, Ranges, calibrate, convert, load_op_list
from autocastfx.errors import CalibrationError, UnmatchedMeasurementWarning, UnsupportedError
from autocastfx.policy.rule import Category
from tests.helpers import Function, op_list, relative_error

EPS = torch.finfo(torch.float16).eps


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Squares(nn.Module):
    """Gated by the square of large activations, which leaves float16's range and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = (y * y) @ self.second.weight
        return self.last(z * 1e-4)


def batches(count: int = 3, scale: float = 1.0, size: int = 8) -> list[Tensor]:
    return [scale * torch.randn(4, size) for _ in range(count)]


@pytest.fixture
def lists(tmp_path: Path) -> list[Any]:
    """Squares in 16 bits, as a list that trusts its ops has it."""
    return ["default", op_list(tmp_path, "allow: [square]")]


def test_a_product_that_overflows_in_float16_is_finite_when_calibrated(lists: list[Any]) -> None:
    model, data = Squares().eval(), batches(scale=600.0)
    blind = convert(model, (data[0],), op_list=lists, dtype="float16")
    assert not blind(data[0]).isfinite().all()
    amp_model = convert(model, (data[0],), op_list=lists, calibrate=data, dtype="float16")
    # Three matrix products of 8 terms, each with its inputs and its output rounded.
    with torch.no_grad():
        assert all(relative_error(amp_model(x), model(x)) < 16 * EPS for x in data)
    decision = amp_model.plan["mul"].decision
    assert decision.category is Category.DENY
    assert decision.source == "forced:range"
    reached = max(float(model.first(x).detach().square().max()) for x in data)
    assert decision.reason == (f"its output reached {reached:.3g} on the calibration data, beyond float16's 65504")
    matmul = amp_model.plan["matmul"]
    assert (matmul.decision.source, matmul.dtype) == ("forced:range", "float32"), "an allow op is forced too"
    assert amp_model.plan["linear"].dtype == "float16"


def test_a_product_of_small_numbers_is_float32_when_calibrated() -> None:
    data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    model, (x, y) = Function(lambda x, y: 1e6 * ((1e-6 * x) @ y)), data[0]
    blind, amp_model = convert(model, (x, y), dtype="float16"), convert(model, (x, y), calibrate=data, dtype="float16")
    assert relative_error(blind(x, y), model(x, y)) > 16 * EPS
    assert relative_error(amp_model(x, y), model(x, y)) < EPS
    matmul = amp_model.plan["matmul"]
    assert (matmul.dtype, matmul.decision.source) == ("float32", "forced:range")
    rms = max(float((1e-6 * x @ y).square().mean().sqrt()) for x, y in data)
    words = f"its output has a root mean square of {rms:.2g} on the calibration data"
    assert matmul.decision.reason == f"{words}, below float16's smallest normal number 6.1e-05"
    assert convert(model, (x, y), calibrate=data, dtype=torch.bfloat16).plan["matmul"].dtype == "bfloat16"


def test_what_is_small_may_be_added_and_all_zeros_are_not_small() -> None:
    data = [(1e-6 * torch.randn(8, 8), torch.randn(8, 8))]
    plan = convert(Function(lambda x, y: (y @ y + x) @ (y + 0.0 * x)), calibrate=data, dtype="float16").plan
    assert plan["matmul"].dtype == plan["matmul_1"].dtype == "float16"
    assert "add" not in {n.name for n in plan.nodes if n.decision.source == "forced:range"}
    plan = convert(Function(lambda x, y: (0.0 * x) @ y), calibrate=data, dtype="float16").plan
    assert plan["matmul"].dtype == "float16"


def test_a_small_weight_of_a_product_is_narrowed_unless_values_were_measured() -> None:
    model, data = nn.Linear(8, 8), batches()
    nn.init.normal_(model.weight, std=1e-6)
    assert convert(model, (data[0],), dtype="float16").plan["linear"].dtype == "float16"
    linear = convert(model, calibrate=data, dtype="float16").plan["linear"]
    assert linear.dtype == "float32"
    assert linear.decision.reason.startswith("its input weight has a root mean square of ")


def test_an_input_too_far_forces_an_allow_op() -> None:
    amp_model = convert(Function(lambda x: (x @ x.t()) / 1e6), calibrate=[torch.eye(4) * 40000.0], dtype="float16")
    decision = amp_model.plan["matmul"].decision
    assert decision.reason.startswith("its output reached 1.6e+09 on the calibration data, beyond")
    amp_model = convert(
        Function(lambda x, y: x @ y), calibrate=[(torch.eye(4) * 40000.0, torch.eye(4) * 1e-3)], dtype="float16"
    )
    decision = amp_model.plan["matmul"].decision
    assert decision.reason == (
        "its input args_0 reached 4e+04 on the calibration data, within a factor 2 of float16's 65504"
    )


@pytest.mark.parametrize(
    ("largest", "headroom", "forced"),
    [(32752.0, 2.0, True), (32751.0, 2.0, False), (65503.0, 1.0, False), (16376.0, 4.0, True), (656.0, 100.0, True)],
)
def test_the_headroom_is_the_caller_s(largest: float, headroom: float, forced: bool) -> None:
    model = Function(lambda x, y: x @ y)
    data = [(torch.full((1, 8), largest), torch.zeros(8, 8))]
    decision = convert(model, calibrate=data, headroom=headroom, dtype="float16").plan["matmul"].decision
    assert (decision.source == "forced:range") == forced
    wide = convert(model, calibrate=data, headroom=headroom, dtype=torch.bfloat16)
    assert wide.plan["matmul"].dtype == "bfloat16"


@pytest.mark.parametrize("headroom", [0.5, 0, -1, float("inf"), float("nan")])
def test_no_headroom_below_one(headroom: float) -> None:
    with pytest.raises(ValueError, match="headroom is a finite factor of at least 1, not"):
        convert(nn.Linear(2, 2), (torch.ones(1, 2),), headroom=headroom, dtype="float16")


def test_streaming_is_all_at_once() -> None:
    model, data = Squares(), batches(5)
    parts, whole = calibrate(model, iter(data)), calibrate(model, [torch.cat(data)])
    assert parts.batches == 5
    assert [r.key for r in parts.values] == [r.key for r in whole.values]
    for part, one in zip(parts.values, whole.values, strict=True):
        # The same products summed in another order, for batches of another size.
        assert part.largest == pytest.approx(one.largest, rel=8 * torch.finfo(torch.float32).eps)


def test_the_maxima_are_those_of_the_model() -> None:
    model, data = Squares(), batches()
    ranges = calibrate(model, data)
    assert ranges["x"].largest == max(float(x.abs().max()) for x in data)
    assert ranges["linear_1"].largest == max(float(model(x).detach().abs().max()) for x in data)
    assert ranges["linear"].module == "first"
    with pytest.raises(KeyError, match="no value 'nothing' was measured"):
        ranges["nothing"]


scales = st.floats(-4, 4, width=32)


@settings(max_examples=15)
@given(st.lists(st.tuples(scales, scales.filter(bool)), min_size=1, max_size=5), st.data())  # to add 0 is no step
def test_affine_chains_give_their_true_maxima(steps: list[tuple[float, float]], data: st.DataObject) -> None:
    rows = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)
    inputs = [torch.tensor(data.draw(rows)) for _ in range(data.draw(st.integers(1, 3)))]

    def chain(x: Tensor) -> list[Tensor]:
        values = [x]
        for scale, shift in steps:
            values += [values[-1] * scale]
            values += [values[-1] + shift]
        return values

    found = calibrate(Function(lambda x: chain(x)[-1]), inputs)
    expected = [max(float(v.abs().max()) for v in values) for values in zip(*map(chain, inputs), strict=True)]
    assert [r.largest for r in found.values] == expected


def test_infinite_values_are_counted_and_not_measured() -> None:
    def model(x: Tensor) -> Tensor:
        return (x / x.relu()).nan_to_num(0.0, 0.0, 0.0)

    ranges = calibrate(Function(model), [torch.tensor([-1.0, 0.0, 3.0]), torch.tensor([-1.0, 1.0, 2.0])])
    assert (ranges["div"].largest, ranges["div"].non_finite) == (1.0, 3)
    assert ranges["nan_to_num"].non_finite == 0
    nothing = calibrate(Function(lambda x: x + float("inf")), [torch.ones(2)])
    assert (nothing["add"].largest, nothing["add"].non_finite) == (0.0, 2)


def test_only_float32_tensors_are_measured() -> None:
    def model(x: Tensor, i: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        values, places = x.topk(1)
        return values, places + i, d * 2, (x > 0).sum(), x[:0].sum(1)

    ranges = calibrate(Function(model), [(torch.ones(2, 3), torch.ones(2, 1).long(), torch.ones(2).double())])
    assert {r.name for r in ranges.values} == {"args_0", "topk", "getitem"}, "an empty tensor reaches nothing"


def test_batches_leave_nothing_behind() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def streamed(count: int) -> Iterator[Tensor]:
        nonlocal most
        for _ in range(count):
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
            x = torch.randn(4, 8)
            alive.append(weakref.ref(x))
            yield x
            del x

    calibrate(Squares(), streamed(6))
    assert most == 1, "only the batch that the loop itself still names"


def test_activations_are_freed_while_a_batch_runs() -> None:
    count, most = 0, 0

    class Tracked(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count, most
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:

                def gone() -> None:
                    nonlocal count
                    count -= 1

                count, most = count + 1, max(most, count + 1)
                weakref.finalize(result.untyped_storage(), gone)
            return result

    def deep(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x * 1.5
        return x

    model, data = Function(deep), [torch.randn(3)]
    with mock.patch("autocastfx.graph.node.NodeRun.run", _under(Tracked())):
        calibrate(model, data)
    assert 1 <= most <= 3


def _under(mode: Any) -> Callable[..., Any]:
    real = torch.fx.Interpreter.run

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return real(*args, **kwargs)

    return run


class Stateful(nn.Module):
    """Everything that a run may change: statistics, a moving average, a parameter, its input, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("twin", self.average)
        self.bound = nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.average.lerp_(x.detach().mean(0), 0.5)
        with torch.no_grad():
            self.bound.clamp_(max=0.5)
        return self.drop(self.norm(x)) * self.bound + self.weight * self.twin


@pytest.mark.parametrize("training", [None, True, False])
def test_the_model_the_batches_and_the_random_numbers_stay_as_they_were(training: bool | None) -> None:
    model, data = Stateful(), batches()
    model.drop.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, flags = [x.clone() for x in data], [m.training for m in model.modules()]
    random.seed(0)
    states = torch.random.get_rng_state(), random.getstate()
    calibrate(model, data, training=training)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(inputs, data, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(p.grad is None for p in model.parameters())


def test_modes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    assert {r.mode for r in calibrate(model, batches()).values} == {"eval"}
    trained = calibrate(model, batches(), training=True)
    assert {r.mode for r in trained.values} == {"train"}
    assert 0 < trained["dropout"].largest <= 2 * trained["linear"].largest
    assert not model.training
    both = trained.merged(calibrate(model, batches()))
    assert {r.mode for r in both.values} == {"train", "eval"}


def test_a_mode_that_was_not_measured_takes_the_ranges_of_the_other() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).eval()
    amp_model = convert(model, calibrate=[torch.full((2, 8), 1e5)], dtype="float16")
    assert amp_model.plan["linear"].decision.source == "forced:range"
    x = batches()[0]
    amp_model.train()(x)
    assert amp_model.plan["linear"].decision.source == "forced:range"
    mild = calibrate(model.eval(), batches(), training=True)
    amp_model = convert(
        model, (batches()[0],), calibrate=calibrate(model, [torch.full((2, 8), 1e5)]).merged(mild), dtype="float16"
    )
    assert amp_model.eval().plan["linear"].decision.source == "forced:range"
    amp_model.train()(x)
    assert amp_model.plan["linear"].dtype == "float16"


def test_outputs_and_inputs_of_any_structure() -> None:
    class Net(nn.Module):
        def forward(self, data: Mapping[str, Tensor], *, scale: float = 1.0) -> dict[str, Any]:
            return {"sum": data["a"] + data["b"], "more": [data["a"] * scale, None, 3]}

    data = {"a": torch.ones(2), "b": torch.ones(2)}
    both = [({"data": data}), ((data,), {"scale": 7.0}), [data], (data,)]
    assert calibrate(Net(), both)["add"].largest == 2.0
    assert calibrate(Net(), both)["mul"].largest == 7.0


def test_a_batch_of_another_call_or_size_is_captured_apart() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        for _ in range(x.shape[0]):
            x = x * 2.0
        return x if y is None else x + y

    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return model(x, y)

    ranges = calibrate(Net(), [torch.ones(2), torch.ones(3), (torch.ones(1), torch.ones(1)), {"x": torch.ones(2)}])
    assert ranges["mul_2"].largest == 8.0
    assert ranges["add"].largest == 3.0
    assert ranges.batches == 4


def test_a_mask_reaches_as_far_as_it_likes() -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, mask.expand(1, 4, 4))

    x, mask = torch.rand(1, 4, 8), torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    amp_model = convert(Function(attend), calibrate=[(x, mask)], dtype="float16")
    assert amp_model.plan["scaled_dot_product_attention"].dtype == "float16"
    # An average of values below 1, rounded on its way in, in its weights and on its way out.
    assert relative_error(amp_model(x, mask), attend(x, mask)) < 6 * EPS
    assert [c.saturates for c in amp_model.plan.casts if c.value == "expand"] == [True]
    blocked = torch.full_like(mask, torch.finfo(torch.float32).min)
    assert amp_model(x, blocked).isfinite().all()


def test_arguments_kept_in_float32_reach_as_far_as_they_like() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    model[1].running_var.fill_(4e4)
    amp_model = convert(model, calibrate=[torch.randn(4, 8)], dtype="float16")
    assert amp_model.plan["batch_norm"].dtype == "float16"


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def test_a_weight_beyond_the_range_needs_no_batches() -> None:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight[0, 0] = 70000.0
    x = torch.full((2, 8), 1e-3)
    amp_model = convert(model, (x,), dtype="float16")
    assert amp_model.plan["linear"].decision.reason == "its input weight holds 7e+04, beyond float16's 65504"
    assert amp_model(x).isfinite().all()
    assert convert(model, (x,), dtype=torch.bfloat16).plan["linear"].dtype == "bfloat16"
    transposed = convert(Transposed(model.weight), (x,), dtype="float16")
    assert transposed(x).isfinite().all()
    with torch.no_grad():
        model.weight[0, 0] = 40000.0
    assert convert(model, (x,), dtype="float16").plan["linear"].dtype == "float16"
    assert convert(model, (x,), calibrate=[x], dtype="float16").plan["linear"].decision.source == "forced:range"


def test_what_is_written_into_a_value_is_where_it_reaches() -> None:
    def model(x: Tensor) -> Tensor:
        table = torch.zeros(8, 8)
        table[1:] = x[1:] * 1e5
        return table @ (x * 1e-4)

    x = torch.rand(8, 8)
    amp_model = convert(Function(model), calibrate=[x], dtype="float16")
    assert amp_model.plan["matmul"].decision.source == "forced:range"
    assert relative_error(amp_model(x), model(x)) < 4 * EPS


def test_a_file_gives_the_same_conversion(tmp_path: Path, lists: list[Any]) -> None:
    model, data = Squares().eval(), batches(scale=600.0)
    ranges = calibrate(model, data, op_list=lists)
    ranges.save(tmp_path / "ranges.json")
    assert Ranges.load(tmp_path / "ranges.json") == ranges
    plans = [
        convert(model, (data[0],), op_list=lists, calibrate=given, dtype="float16").plan
        for given in (ranges, tmp_path / "ranges.json", str(tmp_path / "ranges.json"), data)
    ]
    assert all(plan == plans[0] for plan in plans)


LOSS = "torch.nn.functional.cross_entropy"


@pytest.mark.parametrize(
    "listed",
    [
        {"deny": [LOSS]},
        {"deny": [{LOSS: {"devices": "cpu"}}]},
        {"deny": [{LOSS: {"when": {"reduction": "mean"}}}]},
        {"aliases": {LOSS: "softmax"}},
        {"modules": [{"path": "loss", "category": "float32", "ops": [LOSS]}]},
    ],
    ids=["rule", "device", "when", "alias", "module"],
)
def test_a_function_stays_whole_as_in_the_conversion_wherever_a_list_names_it(listed: dict[str, Any]) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64))

    model = nn.Sequential(OrderedDict(linear=nn.Linear(8, 4), loss=Loss()))
    op_list = load_op_list(["default", OpList.of(listed)])
    ranges = calibrate(model, batches(), op_list=op_list)
    plan = convert(
        model, (batches()[0],), op_list=op_list, calibrate=ranges, dtype="float16"
    ).plan  # no range is without its node
    assert ranges.values[-1].op == plan.nodes[-1].op == LOSS


class Squared(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = x @ x
        return z if y is None else z + y


def test_later_captures_know_the_ranges() -> None:
    x = torch.eye(4) * 1000.0
    amp_model = convert(Squared(), calibrate=[x], dtype="float16")
    again = pickle.loads(pickle.dumps(amp_model))
    for one in (amp_model, again):
        one(x)
        one(x, x)
    for variant in (*amp_model.variants, *again.variants):
        assert variant.plan["matmul"].decision.source == "forced:range"
    assert len(again.variants) > 1


def test_ranges_of_another_model_are_reported_once() -> None:
    ranges = calibrate(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), batches())
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.warns(UnmatchedMeasurementWarning, match="1 of 2 measured values match no node") as caught:
        convert(model, (batches()[0],), calibrate=ranges, dtype="float16")
    assert len(caught) == 1
    assert "'tanh' (tanh) in module '1'" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_converted_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="calibrate the original"):
        calibrate(convert(nn.Linear(8, 8), (batches()[0],), dtype="float16"), batches())


def test_an_exported_program(lists: list[Any]) -> None:
    model, data = Squares().eval(), batches(scale=600.0)
    program = torch.export.export(model, (data[0],))
    assert calibrate(program, data)["mul"].largest == calibrate(model, data)["mul"].largest
    assert (
        convert(program, op_list=lists, calibrate=data, dtype="float16").plan["mul"].decision.source == "forced:range"
    )
    with pytest.raises(UnsupportedError, match=r"leave training=None"):
        calibrate(program, data, training=True)


def test_no_batches() -> None:
    for nothing in ([], iter(())):
        with pytest.raises(CalibrationError, match=r"there are no batches to calibrate on\. An iterator can be read"):
            calibrate(nn.Linear(8, 8), nothing)
    with pytest.raises(CalibrationError, match="there are no batches"):
        convert(nn.Linear(8, 8), calibrate=[], dtype="float16")


@pytest.mark.parametrize("given", [torch.ones(2, 8), {"x": torch.ones(2, 8)}, 3, None])
def test_one_batch_is_no_iterable_of_batches(given: Any) -> None:
    with pytest.raises(TypeError, match=rf"not a {type(given).__name__}; write \[batch\] for one"):
        calibrate(nn.Linear(8, 8), given)


def test_a_batch_that_does_not_fit() -> None:
    with pytest.raises(CalibrationError, match=r"batch 2 does not fit Linear\.forward: too many.*no targets"):
        calibrate(nn.Linear(8, 8), [torch.ones(2, 8), (torch.ones(2, 8), torch.ones(2))])


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []
    calibrate(nn.Linear(8, 8), batches(), progress=done.append)
    assert done == [1, 2, 3]
    assert capsys.readouterr().err == ""
    calibrate(nn.Linear(8, 8), batches(2), progress=True)
    assert capsys.readouterr().err == "\rautocastfx: calibrating, batch 1\rautocastfx: calibrating, batch 2\n"


def test_an_autocast_region_around_it_changes_nothing() -> None:
    model, data = nn.Linear(8, 8), batches()
    with torch.autocast("cpu", torch.bfloat16):
        assert calibrate(model, data) == calibrate(model, data)
        inside = calibrate(model, data)
    assert inside == calibrate(model, data)


def test_what_is_recomposed_reaches_what_its_parts_reached() -> None:
    """No part of the written-out GELU is missed, and its result counts as the operator's."""

    class Gelu(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x @ w
            y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
            return y @ w

    for size, precision in ((1, "low"), (10, "low"), (200, "float32")):  # at 10 the cube alone is beyond the range
        call = (size * torch.eye(8), size * torch.eye(8))
        amp_model = autocastfx.convert(Gelu(), call, calibrate=autocastfx.calibrate(Gelu(), [call]), dtype="float16")
        assert [r.pattern for r in amp_model.plan.recomposed] == ["tanh_gelu"]
        (gelu,) = [n for n in amp_model.plan.nodes if n.op == "gelu"]
        assert str(gelu.placement.run) == precision


def test_what_reads_a_recomposed_value_knows_how_large_it_is() -> None:
    def narrowed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        return y @ w

    call = (300 * torch.eye(8), 1e-3 * torch.eye(8))
    amp_model = convert(Function(narrowed), calibrate=[call], dtype="float16")
    assert [r.pattern for r in amp_model.plan.recomposed] == ["tanh_gelu"]
    assert amp_model.plan["matmul_1"].decision.reason.startswith("its input mul_3_gelu reached 9e+04")
    assert relative_error(amp_model(*call), narrowed(*call)) <= EPS
