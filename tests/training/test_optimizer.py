"""LossScalingOptimizer: what a step does, and what a skipped one leaves alone."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autocastfx import DynamicLossScale, LossScalingOptimizer, NoLossScale, StaticLossScale
from autocastfx.errors import LossScaleError, UnsupportedError
from tests.helpers import TORCH
from tests.training.test_loss_scale import PlainScale

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD momentum": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD foreach": lambda p: SGD(p, 0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
    "SGD fused dampening": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1, fused=True),
    "Adam": lambda p: Adam(p, 0.1),
    "Adam foreach": lambda p: Adam(p, 0.1, foreach=True),
    "Adam fused": lambda p: Adam(p, 0.1, fused=True),
    "AdamW": lambda p: AdamW(p, 0.1, amsgrad=True),
    "AdamW foreach": lambda p: AdamW(p, 0.1, foreach=True),
    "AdamW fused": lambda p: AdamW(p, 0.1, fused=True),
    "Adagrad": lambda p: Adagrad(p, 0.1),
    "Adagrad fused": lambda p: Adagrad(p, 0.1, fused=True),
    "RMSprop": lambda p: RMSprop(p, 0.01, momentum=0.9),
}
FUSED = [name for name in OPTIMIZERS if "fused" in name]
INPUTS = torch.randn(7, 4)


class Model(nn.Module):
    """Three parameters, of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias).square().mean()


def contents(optimizer: Optimizer) -> list[Any]:
    """Weights and state, in order, as values that compare by their bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        if parameter in optimizer.state:
            held += pytree.tree_leaves([copy.deepcopy(v) for _, v in sorted(optimizer.state[parameter].items())])
    return held


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two ``contents`` are equal to the bit."""
    return len(left) == len(right) and all(
        a.equal(b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's number comes to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# ---- steps and skipped steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@settings(max_examples=25)
@given(st.lists(st.booleans(), max_size=8), st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(1, 2))
def test_a_run_with_overflows_is_the_bare_optimizers_run_without_them(
    make: Make, overflows: list[bool], bad: float, hysteresis: int
) -> None:
    rule = DynamicLossScale(2.0**8, interval=2, hysteresis=hysteresis, min=2.0**-2, max=2.0**9)
    model, plain = Model(), PlainScale(rule)
    bare_model = copy.deepcopy(model)
    optimizer, bare = LossScalingOptimizer(make(model.parameters()), rule), make(bare_model.parameters())
    for step, overflow in enumerate(overflows):
        before = contents(optimizer)
        inputs = INPUTS + step
        optimizer.zero_grad()
        optimizer.backward(model(inputs * (bad if overflow else 1.0)))
        scale = optimizer.loss_scaler.value
        optimizer.step()
        plain.step(overflow)
        assert optimizer.last_step.skipped == optimizer.last_step.found_inf == overflow
        assert (optimizer.last_step.scale, optimizer.loss_scaler.value) == (scale, plain.scale)
        if overflow:
            assert same(contents(optimizer), before)
            assert set(optimizer.last_step.culprits) == _names(optimizer, "weight") | _names(optimizer, "bias")
        else:
            bare.zero_grad()
            bare_model(inputs).backward()
            bare.step()
    assert same(contents(optimizer), contents(bare))  # all factors are powers of two: scaling is exact


def _names(optimizer: Optimizer, name: str) -> set[str]:
    place = {"weight": "group 0, parameter 0 of shape (4, 3)", "bias": "group 0, parameter 1 of shape (3,)"}
    return {place[name]}


@pytest.mark.parametrize("max_iter", [1, 4])
@settings(max_examples=25)
@given(st.lists(st.sampled_from([None, 0, 1, 2]), max_size=6))
def test_lbfgs_undoes_a_step_in_which_any_evaluation_overflows(max_iter: int, schedule: list[int | None]) -> None:
    rule = DynamicLossScale(2.0**4, interval=2, min=2.0**-4)
    model, plain = Model(), PlainScale(rule)
    bare_model = copy.deepcopy(model)
    optimizer = LossScalingOptimizer(torch.optim.LBFGS(model.parameters(), 0.1, max_iter), rule)
    bare = torch.optim.LBFGS(bare_model.parameters(), 0.1, max_iter)
    for bad_evaluation in schedule:
        before, evaluations = contents(optimizer), 0

        def closure(bad: int | None = bad_evaluation) -> torch.Tensor:
            nonlocal evaluations
            optimizer.zero_grad()
            loss = model(INPUTS * (math.nan if evaluations == bad else 1.0))
            evaluations += 1
            optimizer.backward(loss)
            return loss

        def bare_closure() -> torch.Tensor:
            bare.zero_grad()
            loss = bare_model(INPUTS)
            loss.backward()
            return loss

        optimizer.step(closure)
        overflow = bad_evaluation is not None and evaluations == bad_evaluation + 1
        plain.step(overflow)
        assert optimizer.last_step.skipped == overflow
        assert optimizer.loss_scaler.value == plain.scale
        if overflow:
            assert same(contents(optimizer), before)
        else:
            bare.step(bare_closure)
    assert same(contents(optimizer), contents(bare))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("evaluations", [1, 3])
def test_lbfgs_undoes_a_step_whose_closure_raises(evaluations: int, low: bool) -> None:
    class Interrupt(BaseException):
        pass

    model = Model().half() if low else Model()
    inputs = INPUTS.to(model.weight.dtype)
    optimizer = LossScalingOptimizer(torch.optim.LBFGS(model.parameters(), 0.1, 4), DynamicLossScale(2.0**4))
    left = math.inf

    def closure() -> torch.Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupt
        optimizer.zero_grad()
        loss = model(inputs).float()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    before, weights = contents(optimizer), copy.deepcopy(list(model.parameters()))
    left = evaluations
    with pytest.raises(Interrupt):
        optimizer.step(closure)
    assert same(contents(optimizer), before)
    assert same(list(model.parameters()), weights)
    left = math.inf
    optimizer.step(closure)
    assert not optimizer.last_step.skipped
    assert not same(contents(optimizer), before)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW fused"]])
def test_a_closure_is_called_once_and_its_loss_returned(make: Make, by_keyword: bool) -> None:
    model, calls = Model(), 0
    optimizer = LossScalingOptimizer(make(model.parameters()))

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(INPUTS)
        optimizer.backward(loss)
        return loss

    for step in range(3):
        expected = model(INPUTS).detach()
        with torch.no_grad():
            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        assert loss.equal(expected)
        assert calls == step + 1
    with torch.no_grad():
        assert model(INPUTS) < expected


def test_losses_of_sixteen_bits_are_scaled_in_float32() -> None:
    optimizer = LossScalingOptimizer(SGD(Model().parameters(), 0.1))
    low, wide = torch.tensor(2.0, dtype=torch.float16), torch.tensor(3.0, dtype=torch.float64)
    scaled = optimizer.scale_loss({"low": low, "others": [wide, torch.tensor(4.0)]})
    assert scaled["low"].dtype == torch.float32
    assert scaled["low"] == 2.0**17
    assert scaled["others"][0].dtype == torch.float64
    assert [float(loss) for loss in scaled["others"]] == [3 * 2.0**16, 2.0**18]


def test_gradients_accumulate_over_micro_batches_and_losses() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.0))
    for part in (INPUTS[:3], INPUTS[3:]):
        optimizer.backward(model(part))
    loss, other = optimizer.scale_loss((model(INPUTS), model(-INPUTS)))
    (loss + other).backward()
    optimizer.unscale_()
    accumulated = model.weight.grad
    bare = Model()
    for part in (INPUTS[:3], INPUTS[3:]):
        bare(part).backward()
    (bare(INPUTS) + bare(-INPUTS)).backward()
    assert accumulated is not None
    assert accumulated.equal(bare.weight.grad)


def test_without_any_gradient_a_step_does_nothing() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(Adam(model.parameters()))
    optimizer.step()
    assert not optimizer.last_step.skipped
    assert same(contents(optimizer), contents(Adam(Model().parameters())))


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW fused"]])
def test_steps_without_gradients_do_not_count_as_good_ones(make: Make) -> None:
    model = Model()
    optimizer = LossScalingOptimizer(make(model.parameters()), DynamicLossScale(4.0, interval=2))
    for _ in range(3):
        optimizer.step()
        assert not optimizer.last_step.skipped
    assert optimizer.loss_scaler.state_dict() == {"scale": 4.0, "good_steps": 0, "spare": 1}
    for scale in (4.0, 8.0):
        optimizer.zero_grad()
        optimizer.backward(model(INPUTS))
        optimizer.step()
        assert optimizer.loss_scaler.value == scale


# ---- no rule, or a fixed one ----------------------------------------------------------------------------------------


def test_without_a_loss_scale_it_is_the_bare_optimizer() -> None:
    model, bare_model = Model(), Model()
    optimizer, bare = LossScalingOptimizer(Adam(model.parameters()), NoLossScale()), Adam(bare_model.parameters())
    loss = model(INPUTS)
    assert optimizer.scale_loss(loss) is loss
    loss.backward()
    bare_model(INPUTS).backward()
    optimizer.step()
    bare.step()
    assert same(contents(optimizer), contents(bare))
    assert (optimizer.last_step.skipped, optimizer.last_step.scale) == (False, 1.0)


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["SGD momentum"]])
@pytest.mark.parametrize("rule", [NoLossScale(), DynamicLossScale(8.0)], ids=str)
def test_a_warm_up_may_begin_at_a_rate_of_zero(rule: Any, make: Make) -> None:
    """torch.distributed.checkpoint makes an optimizer's state by a step of rate 0, too."""
    model, bare_model = Model().bfloat16(), Model().bfloat16()
    optimizer, bare = LossScalingOptimizer(make(model.parameters()), rule), make([torch.zeros(1)])
    bare.param_groups[0]["params"] = masters = [nn.Parameter(p.detach().float()) for p in bare_model.parameters()]
    for rate in (0.0, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = bare.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = model(INPUTS.bfloat16())
        optimizer.backward(loss) if rule.is_checked else loss.backward()
        optimizer.step()
        assert not optimizer.last_step.skipped
        for master, own in zip(masters, optimizer.param_groups[0]["params"], strict=True):
            master.grad = own.grad
        bare.step()
        assert same(contents(optimizer), contents(bare))
    assert not model.weight.equal(Model().weight)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("has_unused", [False, True])
def test_a_loss_that_was_not_scaled_is_refused_at_a_rate_of_zero(has_unused: bool, low: bool) -> None:
    model = Model().half() if low else Model()
    optimizer = LossScalingOptimizer(SGD(list(model.parameters())[: 3 if has_unused else 2], 0.0))
    model(INPUTS.to(model.weight.dtype)).backward()
    with pytest.raises(LossScaleError, match="no loss was scaled"):
        optimizer.step()


def test_a_static_scale_skips_and_stays() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1), StaticLossScale(128.0))
    for bad in (True, True, False):
        optimizer.zero_grad()
        optimizer.backward(model(INPUTS * (math.inf if bad else 1)))
        optimizer.step()
        assert (optimizer.last_step.skipped, optimizer.last_step.scale) == (bad, 128.0)


# ---- the floor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW fused"]])
@pytest.mark.parametrize("hysteresis", [1, 3])
def test_an_overflow_at_the_floor_names_the_parameters(make: Make, hysteresis: int) -> None:
    model = Model()
    rule = DynamicLossScale(4.0, min=1.0, hysteresis=hysteresis)
    optimizer = LossScalingOptimizer(make(model.named_parameters()), rule)
    optimizer.backward(model(INPUTS))
    optimizer.step()
    before = contents(optimizer)
    for _ in range(2 + hysteresis - 1):
        optimizer.zero_grad()
        optimizer.backward(model(INPUTS * math.inf))
        optimizer.step()
    assert optimizer.loss_scaler.value == 1.0
    optimizer.zero_grad()
    optimizer.backward(model(INPUTS * math.inf))
    expected = "gradients of weight, bias are not finite, and the loss scale is at its floor \\(1\\).*find_overflow"
    with pytest.raises(LossScaleError, match=expected):
        optimizer.step()
    assert same(contents(optimizer), before)
    assert optimizer.loss_scaler.value == 1.0
    optimizer.zero_grad()
    optimizer.backward(model(INPUTS))
    optimizer.step()  # and goes on
    assert not optimizer.last_step.skipped


def test_a_tolerated_overflow_at_the_floor_is_no_error() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1), DynamicLossScale(1.0, hysteresis=2))
    optimizer.backward(model(INPUTS * math.inf))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model(INPUTS * math.inf))
    with pytest.raises(LossScaleError):
        optimizer.step()


# ---- host reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_reads_nothing_on_the_host_if_fused_and_one_number_else(name: str) -> None:
    if name == "Adagrad fused" and TORCH < (2, 13):
        pytest.skip("before torch 2.13 it takes no scale")
    model = Model()
    optimizer = LossScalingOptimizer(OPTIMIZERS[name](model.parameters()))

    def step(scale: float = 1.0, clip: bool = True) -> int:
        optimizer.zero_grad()
        loss = model(INPUTS * scale)
        with HostReads() as reads:
            optimizer.backward(loss)
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        return reads.count

    bare_model = copy.deepcopy(model)
    bare = OPTIMIZERS[name](bare_model.parameters())
    step()  # in which the optimizer makes its state
    for _ in range(2):
        bare.zero_grad()
        bare_model(INPUTS).backward()
        with HostReads() as own:  # those of the optimizer itself
            bare.step()
    expected = 0 if name in FUSED else 1
    assert [step(scale) - (own.count if scale == 1 else 0) for scale in (1.0, math.inf, 1.0)] == [expected] * 3
    with HostReads() as reads:
        assert not optimizer.last_step.skipped
    assert reads.count == 1


@pytest.mark.parametrize("has_stepped", [False, True])
def test_after_loading_the_state_that_is_there_says_whether_the_device_decides(has_stepped: bool) -> None:
    """Of a state that was never made the next step makes it, which the device must not skip."""
    model = Model()
    saved = LossScalingOptimizer(AdamW(model.parameters(), fused=True))
    if has_stepped:
        saved.backward(model(INPUTS))
        saved.step()
    optimizer = LossScalingOptimizer(AdamW(model.parameters(), fused=True))
    for _ in range(2):  # the second time, over a state of its own
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        optimizer.zero_grad()
        loss = model(INPUTS)
        with HostReads() as reads:
            optimizer.backward(loss)
            optimizer.step()
        assert reads.count == (0 if has_stepped else 1)


# ---- out of order ---------------------------------------------------------------------------------------------------


def test_a_loss_that_was_not_scaled_is_refused() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    model(INPUTS).backward()
    with pytest.raises(
        LossScaleError,
        match=r"no loss was scaled since the last step or zero_grad\(\): call optimizer\.backward\(loss\)",
    ):
        optimizer.step()
    assert model.weight.equal(Model().weight)


def test_a_loss_that_was_not_scaled_is_refused_after_the_gradients_of_one_that_was_are_dropped() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    optimizer.backward(model(INPUTS))
    optimizer.zero_grad()
    model(INPUTS).backward()
    with pytest.raises(LossScaleError, match="no loss was scaled since the last step or zero_grad"):
        optimizer.step()
    assert model.weight.equal(Model().weight)


@pytest.mark.parametrize("low", [False, True])
def test_a_loss_that_was_not_scaled_is_refused_after_the_model_has_dropped_its_gradients(low: bool) -> None:
    model = Model().half() if low else Model()
    inputs = INPUTS.to(model.weight.dtype)
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    for _ in range(2):
        model.zero_grad()
        optimizer.backward(model(inputs).float())
        optimizer.step()
    before = contents(optimizer)
    model.zero_grad()
    optimizer.backward(model(inputs).float())
    model.zero_grad()
    model(inputs).backward()
    with pytest.raises(LossScaleError, match="no loss was scaled since the last step or zero_grad"):
        optimizer.step()
    assert same(contents(optimizer), before)
    model.zero_grad()
    optimizer.backward(model(inputs).float())
    optimizer.step()


def test_a_scaled_loss_may_go_backward_in_parts() -> None:
    model, bare_model = Model(), Model()
    optimizer, bare = LossScalingOptimizer(SGD(model.parameters(), 0.1)), SGD(bare_model.parameters(), 0.1)
    for _ in range(2):
        for parts in (INPUTS[:3], INPUTS[3:]):
            hidden = parts @ model.weight
            cut = hidden.detach().requires_grad_()
            optimizer.backward((cut + model.bias).square().mean())
            hidden.backward(cut.grad)  # a backward pass of its own
            bare_model(parts).backward()
        optimizer.step()
        bare.step()
        model.zero_grad()
        bare.zero_grad()
    assert same(contents(optimizer), contents(bare))


def test_a_wrapper_that_is_gone_leaves_its_parameters_alone() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    assert model.weight._backward_hooks
    del optimizer
    gc.collect()
    assert not model.weight._backward_hooks


def test_gradients_may_be_dropped_between_scaling_a_loss_and_going_backward() -> None:
    model, bare_model = Model(), Model()
    optimizer, bare = LossScalingOptimizer(SGD(model.parameters(), 0.1)), SGD(bare_model.parameters(), 0.1)
    loss = optimizer.scale_loss(model(INPUTS))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    bare_model(INPUTS).backward()
    bare.step()
    assert same(contents(optimizer), contents(bare))


def test_gradients_of_a_functional_transform_are_those_of_a_scaled_loss() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = LossScalingOptimizer(SGD([weight], 0.5))
    weight.grad = torch.func.grad(lambda w: optimizer.scale_loss(w.square().sum()))(weight.detach())
    optimizer.step()
    assert weight.eq(0).all()


def test_a_loss_after_unscaling_is_refused() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    optimizer.backward(model(INPUTS))
    optimizer.unscale_()
    optimizer.unscale_()  # once is enough
    with pytest.raises(LossScaleError, match="the gradients are unscaled already"):
        optimizer.backward(model(INPUTS))
    optimizer.zero_grad()
    optimizer.backward(model(INPUTS))
    optimizer.step()


def test_what_cannot_be_wrapped_is_refused() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(UnsupportedError, match="scales its loss already"):
        LossScalingOptimizer(LossScalingOptimizer(optimizer))
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer, not a list"):
        LossScalingOptimizer([optimizer])  # type: ignore[arg-type]
    complex_one = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match=r"parameter 1 of shape \(2,\) is torch\.complex64: complex"):
        LossScalingOptimizer(SGD([nn.Parameter(torch.ones(2)), complex_one], 0.1))
    wrapped = LossScalingOptimizer(optimizer)
    with pytest.raises(UnsupportedError, match="complex"):
        wrapped.add_param_group({"params": [complex_one]})
    assert len(wrapped.param_groups) == 1


# ---- clipping, norms ------------------------------------------------------------------------------------------------


def test_the_norm_of_a_step_is_found_while_its_gradients_are_there() -> None:
    model, bare = Model(), Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    with pytest.raises(LossScaleError, match="there was no step yet"):
        _ = optimizer.last_step
    optimizer.backward(model(INPUTS))
    optimizer.step()
    bare(INPUTS).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in bare.parameters() if p.grad is not None])
    assert optimizer.last_step.grad_norm == float(norm)
    assert optimizer.last_step.culprits == ()
    assert repr(optimizer.last_step) == "StepResult(skipped=False, scale=65536)"
    optimizer.backward(model(INPUTS))
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(LossScaleError, match="the gradients of that step are gone: read"):
        _ = optimizer.last_step.grad_norm


# ---- as an optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_a_skipped_first_step_raises_no_scheduler_warning(inside: bool) -> None:
    model = Model()
    inner = SGD(model.parameters(), 1.0)
    if inside:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        optimizer = LossScalingOptimizer(inner)
    else:
        optimizer = LossScalingOptimizer(inner)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.backward(model(INPUTS * math.inf))
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5


def test_a_scheduler_can_wait_for_the_weights() -> None:
    model = Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for bad in (True, False, True, False):
        optimizer.zero_grad()
        optimizer.backward(model(INPUTS * (math.inf if bad else 1)))
        optimizer.step()
        optimizer.step_scheduler(scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


def test_it_has_the_groups_state_defaults_and_methods_of_the_one_it_wraps() -> None:
    class WithMode(SGD):
        def train(self) -> str:
            return "training"

    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    inner = WithMode([first], 0.1)
    optimizer = LossScalingOptimizer(inner)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.train() == "training"
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.5]
    assert repr(optimizer).startswith("LossScalingOptimizer(DynamicLossScale(init=65536.0")
    with pytest.raises(AttributeError, match="evaluate"):
        _ = optimizer.evaluate


def test_step_hooks_run_around_each_step_and_may_change_its_closure() -> None:
    model, seen = Model(), list[str]()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1))
    optimizer.optimizer.register_step_post_hook(lambda *_: seen.append("wrapped"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        seen.append("closure")
        optimizer.backward(model(INPUTS * (math.inf if len(seen) < 4 else 1)))
        return 1.0

    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before") or ((o, closure), {}))
    assert optimizer.step() == 1.0
    assert seen == ["before", "closure", "after"]
    optimizer.zero_grad()
    assert optimizer.step() == 1.0
    assert seen[3:] == ["before", "closure", "wrapped", "after"]
    handle.remove()


def test_hooks_of_state_dicts_are_the_wrapped_ones() -> None:
    optimizer, seen = LossScalingOptimizer(SGD([nn.Parameter(torch.ones(2))], 0.1)), list[Any]()
    optimizer.register_state_dict_pre_hook(seen.append)
    optimizer.state_dict()
    assert seen == [optimizer.optimizer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hooks_of_both_optimizers_run_once_each(dtype: torch.dtype) -> None:
    parameter, seen = nn.Parameter(torch.ones(2, dtype=dtype)), list[str]()
    inner = SGD([parameter], 0.1)
    dicts = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")

    def register(who: str, on: Any) -> None:
        for kind in (*dicts, "step_pre", "step_post"):
            getattr(on, f"register_{kind}_hook")(lambda *_, kind=kind: seen.append(f"{who} {kind}"))

    register("inner", inner)
    optimizer = LossScalingOptimizer(inner, DynamicLossScale(2.0**4))
    register("outer", optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [f"{who} {kind}" for kind in dicts for who in ("inner", "outer")]
    seen.clear()
    optimizer.backward(parameter.sum())
    optimizer.step()
    assert seen == ["outer step_pre", "inner step_pre", "inner step_post", "outer step_post"]


class Lookahead(Optimizer):
    """Wraps another, as pytorch_optimizer does: without Optimizer.__init__, and with a state dict of its own form."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = optimizer.state, optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> Any:
        return {"base": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["base"])


def test_an_optimizer_that_wraps_another_without_torchs_init() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), list[str]()
    inner = SGD([parameter], 0.1, momentum=0.9)
    inner.register_state_dict_pre_hook(lambda *_: seen.append("state dict"))
    inner.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer = LossScalingOptimizer(Lookahead(inner), DynamicLossScale(2.0**4))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.backward(parameter.sum())
    optimizer.step()
    assert torch.equal(parameter, torch.full((2,), 0.9))
    kept = copy.deepcopy(optimizer.state_dict())
    assert seen == ["before", "step", "state dict"]
    inner.state[parameter]["momentum_buffer"].zero_()
    optimizer.load_state_dict(kept)
    assert inner.state[parameter]["momentum_buffer"].tolist() == [1.0, 1.0]


# ---- several optimizers ---------------------------------------------------------------------------------------------


def test_two_optimizers_with_a_scale_each_do_not_see_each_other() -> None:
    first, second = Model(), Model()
    one = LossScalingOptimizer(SGD(first.parameters(), 0.1))
    two = LossScalingOptimizer(SGD(second.parameters(), 0.1))
    for bad in (True, False):
        for optimizer, model in ((one, first), (two, second)):
            optimizer.zero_grad()
            optimizer.backward(model(INPUTS * (math.inf if bad and optimizer is one else 1)))
        one.step()
        two.step()
        assert (one.last_step.skipped, two.last_step.skipped) == (bad, False)
    assert (one.loss_scaler.value, two.loss_scaler.value) == (2.0**15, 2.0**16)


def test_two_optimizers_can_share_a_scale_that_is_updated_once_a_round() -> None:
    body, head = Model(), nn.Parameter(torch.ones(()))
    one = LossScalingOptimizer(SGD(body.parameters(), 0.1), DynamicLossScale(2.0**4, interval=3))
    two = LossScalingOptimizer(SGD([head], 0.1), one.loss_scaler)
    bare_body, bare_head = Model(), nn.Parameter(torch.ones(()))
    bare = SGD([*bare_body.parameters(), bare_head], 0.1)
    scales = []
    for _ in range(4):
        one.loss_scaler.scale(body(INPUTS) * head).backward()
        one.step()
        assert (one.loss_scaler.value, two.loss_scaler.state_dict()["scale"]) == (one.last_step.scale,) * 2
        two.step()
        one.loss_scaler.update()
        one.zero_grad()
        two.zero_grad()
        scales.append((one.last_step.scale, two.last_step.scale))
        (bare_body(INPUTS) * bare_head).backward()
        bare.step()
        bare.zero_grad()
    assert scales == [(16.0, 16.0)] * 3 + [(32.0, 32.0)]
    assert body.weight.equal(bare_body.weight)
    assert head.equal(bare_head)
    two.loss_scaler.scale(body(INPUTS) * head * math.inf).backward()
    one.step()
    two.step()
    assert one.loss_scaler.value == 32.0
    two.loss_scaler.update()
    assert one.loss_scaler.value == 16.0


def _shared() -> tuple[Model, LossScalingOptimizer, Model, LossScalingOptimizer]:
    first, second = Model(), Model()
    one = LossScalingOptimizer(SGD(first.parameters(), 0.0))
    return first, one, second, LossScalingOptimizer(SGD(second.parameters(), 0.0), one.loss_scaler)


def test_with_a_shared_scale_each_optimizer_wants_a_scaled_loss() -> None:
    first, one, second, two = _shared()
    one.backward(first(INPUTS))
    second(INPUTS).backward()
    with pytest.raises(LossScaleError, match="there are gradients, but no loss was scaled"):
        two.step()
    one.step()
    with pytest.raises(LossScaleError, match="there are gradients, but no loss was scaled"):
        two.step()


def test_gradients_that_add_up_over_an_update_of_a_shared_scale_are_refused() -> None:
    first, one, second, two = _shared()
    two.backward(second(INPUTS))  # the first of two micro-batches
    one.backward(first(INPUTS * math.inf))
    one.step()
    one.loss_scaler.update()
    two.backward(second(INPUTS))
    with pytest.raises(LossScaleError, match="the shared scale was updated while gradients were added up"):
        two.step()


@pytest.mark.parametrize("low", [False, True])
def test_two_networks_against_each_other_may_scale_as_with_gradscaler(low: bool) -> None:
    """Each loss reaches both networks; the gradients that a network does not want are dropped by its own zero_grad."""
    nets = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    for net in nets:
        nn.init.eye_(net.weight)
        net.to(torch.float16 if low else torch.float32)
    inputs = torch.ones(2, 4, dtype=nets[0].weight.dtype)
    one = LossScalingOptimizer(SGD(nets[0].parameters(), 2.0**-6), DynamicLossScale(2.0**4, interval=1))
    two = LossScalingOptimizer(SGD(nets[1].parameters(), 2.0**-6), one.loss_scaler)
    for number in range(3):
        for net, optimizer in zip(nets, (one, two), strict=True):
            net.zero_grad()
            one.loss_scaler.scale(nets[1](nets[0](inputs)).float().mean()).backward()
            optimizer.step()
        one.loss_scaler.update()
        assert one.loss_scaler.value == 2.0 ** (5 + number)
    bare = [torch.eye(4, requires_grad=True), torch.eye(4, requires_grad=True)]
    for _ in range(3):
        for weight in bare:
            (grad,) = torch.autograd.grad((torch.ones(2, 4) @ bare[0].T @ bare[1].T).mean(), weight)
            weight.data -= 2.0**-6 * grad
    eps = torch.finfo(inputs.dtype).eps
    for net, weight in zip(nets, bare, strict=True):
        assert (net.weight - weight).abs().max() <= 8 * eps


def test_copies_of_two_optimizers_share_a_scale_of_their_own() -> None:
    first, one, second, two = _shared()
    copies = copy.deepcopy((first, one, second, two))
    copies[1].backward(copies[0](INPUTS * math.inf))
    copies[1].step()
    assert copies[3].loss_scaler.value == 2.0**16
    copies[3].loss_scaler.update()
    assert (copies[1].loss_scaler.value, one.loss_scaler.value) == (2.0**15, 2.0**16)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _train(model: Model, optimizer: LossScalingOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(model(INPUTS * (math.inf if step % 3 == 1 else 1 + step)))
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resuming_is_never_having_stopped(make: Make) -> None:
    rule = DynamicLossScale(2.0**8, interval=2, hysteresis=2)
    model = Model()
    optimizer = LossScalingOptimizer(make(model.parameters()), rule)
    _train(model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _train(model, optimizer, range(4, 9))

    resumed = Model()
    again = LossScalingOptimizer(make(resumed.parameters()), rule)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    _train(resumed, again, range(4, 9))
    assert same(contents(again), contents(optimizer))
    assert again.loss_scaler.state_dict() == optimizer.loss_scaler.state_dict()
    assert ("masters" in saved[1]) == bool(len(optimizer.masters))


def test_the_state_of_a_bare_optimizer_is_taken_over() -> None:
    model = Model()
    bare = Adam(model.parameters())
    model(INPUTS).backward()
    bare.step()
    optimizer = LossScalingOptimizer(Adam(model.parameters()), DynamicLossScale(64.0))
    optimizer.load_state_dict(bare.state_dict())
    assert same(contents(optimizer), contents(bare))
    assert optimizer.loss_scaler.value == 64.0


def test_the_state_of_a_gradscaler_is_taken_over() -> None:
    model = Model()
    bare, scaler = SGD(model.parameters(), 0.0), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
    for bad in (True, False, False):
        bare.zero_grad()
        scaler.scale(model(INPUTS * (math.inf if bad else 1))).backward()
        scaler.step(bare)
        scaler.update()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.0), DynamicLossScale(interval=3))
    optimizer.load_state_dict(scaler.state_dict())
    assert optimizer.loss_scaler.state_dict() == {"scale": 2.0**9, "good_steps": 2, "spare": 1}
    optimizer.backward(model(INPUTS))
    optimizer.step()
    assert optimizer.loss_scaler.value == 2.0**10


def test_a_wrong_state_is_refused() -> None:
    optimizer = LossScalingOptimizer(SGD(Model().parameters(), 0.1))
    with pytest.raises(
        LossScaleError, match=r"a loss scale's state has 'scale' and 'good_steps'.*, this one has \['x'\]"
    ):
        optimizer.load_state_dict({"x": 1})
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    state["loss_scale"] = {}
    with pytest.raises(LossScaleError, match=r"this one has \[\]"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1  # nothing half done


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, 2.0**25])
def test_a_state_with_a_wrong_scale_is_refused_whole(scale: float) -> None:
    model = Model()
    optimizer = LossScalingOptimizer(Adam(model.parameters(), 0.1))
    _train(model, optimizer, range(1))
    before, state = contents(optimizer), copy.deepcopy(optimizer.state_dict())
    state["loss_scale"]["scale"] = scale
    state["param_groups"][0]["lr"] = 7.0
    state["state"][0]["exp_avg"].fill_(5.0)
    with pytest.raises(LossScaleError, match="scale"):
        optimizer.load_state_dict(state)
    with pytest.raises(LossScaleError, match="scale"):
        optimizer.load_state_dict({"scale": scale, "_growth_tracker": 0})
    assert same(contents(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    _train(model, optimizer, range(2, 3))
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("rule", [NoLossScale(), StaticLossScale(128.0)], ids=str)
def test_the_scale_of_a_run_with_another_rule_is_refused_and_may_be_left_out(rule: Any) -> None:
    model = Model()
    saved = LossScalingOptimizer(SGD(model.parameters(), 0.5)).state_dict()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1), rule)
    with pytest.raises(LossScaleError, match=r"65536, but the scale of .* load the state without its 'loss_scale'\."):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    del saved["loss_scale"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.loss_scaler.value == rule.initial


@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copied", "pickled"])
def test_a_copy_steps_as_the_original(again: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = LossScalingOptimizer(Adam(model.parameters()), DynamicLossScale(2.0**8, interval=2))
    _train(model, optimizer, range(3))
    model2, optimizer2 = again((model, optimizer))
    _train(model2, optimizer2, range(3, 6))
    _train(model, optimizer, range(3, 6))
    assert same(contents(optimizer2), contents(optimizer))
    assert optimizer2.loss_scaler.value == optimizer.loss_scaler.value


def test_a_word_that_means_no_processes_is_refused() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(ValueError, match=r"process_group is 'sharded', 'world', a process group or None, not 'all'\."):
        LossScalingOptimizer(inner, process_group="all")


def test_gradients_that_can_be_differentiated_again_are_refused_with_a_scale() -> None:
    weight = nn.Parameter(torch.ones(3))
    for scale in (None, NoLossScale()):
        optimizer = LossScalingOptimizer(SGD([weight], 0.1), scale)
        (weight.grad,) = torch.autograd.grad(optimizer.scale_loss(weight.square().sum()), weight, create_graph=True)
        if scale is None:
            with pytest.raises(LossScaleError, match="derivatives of them would keep the loss scale"):
                optimizer.step()
    optimizer.step()
    weight.grad = None  # or the graph of the gradient lives on


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_scales_and_skips_as_it_is(fused: bool) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(4, 2)
        optimizer = LossScalingOptimizer(AdamW(layer.parameters(), 0.1, fused=fused))
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            optimizer.backward(layer(torch.ones(3, 4)).square().mean() * factor)
            step()
            found.append((optimizer.last_step.skipped, optimizer.loss_scaler.value, layer.weight.detach().clone()))
    for plain, compiled in zip(found[:3], found[3:], strict=True):
        assert plain[:2] == compiled[:2]
        assert torch.equal(plain[2], compiled[2])


def test_without_a_loss_scale_another_default_device_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.1), NoLossScale())
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with torch.device("meta"):
        optimizer.step()
    assert not optimizer.last_step.skipped
