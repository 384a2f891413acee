"""Float32 masters of a model whose weights have 16 bits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from autocastfx import DynamicLossScale, LossScaleError, LossScalingOptimizer, NoLossScale
from tests.test_optimizer import OPTIMIZERS, Make, contents, same

LOW = (torch.float16, torch.bfloat16)


class Mixed(nn.Module):
    """A 16-bit weight and a float32 one, as a model made ``.half()`` but for its norms."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.arange(12).reshape(4, 3) / 8).to(dtype))
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.to(self.weight.dtype) @ self.weight).float() * self.scale).sum()


def ones(rows: int = 2) -> torch.Tensor:
    return torch.ones(rows, 4)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_small_updates_add_up_in_the_master(dtype: torch.dtype) -> None:
    """An update of a quarter of the distance to the next 16-bit number is lost in 16 bits."""
    update = torch.finfo(dtype).eps / 4
    model = Mixed(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 1.0), DynamicLossScale(2.0**4))
    for step in range(1, 5):
        optimizer.zero_grad()
        optimizer.backward(-update * model(torch.eye(4)))
        optimizer.step()
        master = optimizer.param_groups[0]["params"][0]
        assert master.dtype == torch.float32
        assert master.eq(1 + step * update).all()
        assert model.weight.equal(master.to(dtype))
    assert model.weight.eq(1 + torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_float32_weights_with_the_same_gradients(make: Make, dtype: torch.dtype) -> None:
    model = Mixed(dtype)
    optimizer = LossScalingOptimizer(make(model.parameters()), DynamicLossScale(2.0**4, interval=2))
    plain = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    bare = make(plain)
    for step in range(5):
        bad = step in (0, 2)
        before = contents(optimizer), model.weight.detach().clone()
        optimizer.zero_grad()
        optimizer.backward(model(ones() * (math.inf if bad else 1 + step)))
        optimizer.step()
        assert optimizer.last_step.skipped == bad
        if bad:
            assert same(contents(optimizer), before[0])
            assert model.weight.equal(before[1])
            continue
        for parameter, master in zip(plain, optimizer.param_groups[0]["params"], strict=True):
            parameter.grad = master.grad.clone() if master.grad is not None else None
        bare.step()
        assert same(contents(optimizer), contents(bare))
        assert model.weight.equal(plain[0].to(dtype))
    assert optimizer.param_groups[0]["params"][1] is model.scale  # float32 weights are their own masters


def test_gradients_of_sixteen_bits_are_unscaled_and_clipped_in_float32() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 1.0), DynamicLossScale(2.0**16))
    optimizer.backward(2.0**-30 * model(ones()))  # 2**-29 is 0 in float16, its 2**16-fold is not
    optimizer.unscale_()
    (master,) = optimizer.param_groups[0]["params"]
    assert master.grad.eq(2.0**-29).all()
    norm = optimizer.clip_grad_norm_(2.0**-32)
    assert norm == pytest.approx(2.0**-29 * math.sqrt(12), rel=4 * torch.finfo(torch.float32).eps)
    assert float(master.grad.norm()) <= 2.0**-32


def test_micro_batches_add_up_in_float32_on_request() -> None:
    def total(accumulates: bool) -> torch.Tensor:
        model = Mixed(torch.float16)
        optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight, model.scale], 1.0), DynamicLossScale(1.0))
        optimizer.backward(2048 * model(ones(1)))
        for _ in range(4):
            if accumulates:
                optimizer.accumulate()
                assert model.weight.grad is None
            optimizer.backward(model(ones(1)))  # 2048 + 1 is 2048 in float16
        optimizer.unscale_()
        assert model.scale.grad is not None
        assert model.scale.grad.equal((2048 + 4) * model.weight.detach().float().sum(0))  # float32: adds up by itself
        return optimizer.param_groups[0]["params"][0].grad

    assert total(accumulates=True).eq(2052).all()
    assert total(accumulates=False).eq(2048).all()


def test_an_overflow_in_one_micro_batch_skips_the_step() -> None:
    model = Mixed(torch.float16)
    before = model.weight.detach().clone()
    optimizer = LossScalingOptimizer(torch.optim.Adam([model.weight]))
    optimizer.backward(model(ones() * 2.0**12))
    optimizer.accumulate()
    optimizer.backward(model(ones() * 2.0**-4))
    optimizer.step()
    assert optimizer.last_step.skipped
    assert model.weight.equal(before)


def test_masters_follow_weights_that_are_changed_from_outside() -> None:
    model = Mixed(torch.bfloat16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 1.0), NoLossScale())
    other = Mixed(torch.bfloat16)
    with torch.no_grad():
        other.weight.fill_(3.0)
    model.load_state_dict(other.state_dict())
    model(torch.eye(4)).backward()
    optimizer.step()
    assert model.weight.eq(2.0).all()
    assert optimizer.param_groups[0]["params"][0].eq(2.0).all()


def test_without_a_loss_scale_masters_are_kept_too() -> None:
    model = Mixed(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 2.0**-9), NoLossScale())
    for _ in range(4):
        optimizer.zero_grad()
        (-model(torch.eye(4))).backward()
        optimizer.step()
    assert model.weight.eq(1 + 2.0**-7).all()


def test_state_made_before_wrapping_is_widened_and_groups_added_later_have_masters() -> None:
    model = Mixed(torch.bfloat16)
    bare = torch.optim.SGD([model.weight], 1.0, momentum=0.5)
    model(ones()).backward()
    bare.step()
    momentum = bare.state[model.weight]["momentum_buffer"].clone()
    optimizer = LossScalingOptimizer(bare)
    (master,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[master]["momentum_buffer"].equal(momentum.float())
    assert model.weight not in optimizer.state
    late = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [late]})
    optimizer.zero_grad()
    optimizer.backward(late.sum())
    optimizer.step()
    assert late.eq(0).all()


def test_zero_grad_drops_the_gradients_of_both() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), 1.0))
    optimizer.backward(model(ones()))
    optimizer.accumulate()
    optimizer.backward(model(ones()))
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model.parameters(), *optimizer.param_groups[0]["params"]))


@pytest.mark.parametrize("again", ["load", "copy"])
def test_resuming_is_never_having_stopped(again: str) -> None:
    def train(model: Mixed, optimizer: LossScalingOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            optimizer.backward(model(ones() * (math.inf if step == 2 else 1 + step)))
            optimizer.step()

    def start() -> tuple[Mixed, LossScalingOptimizer]:
        model = Mixed(torch.float16)
        return model, LossScalingOptimizer(torch.optim.Adam(model.parameters(), 1e-4))

    model, optimizer = start()
    train(model, optimizer, range(4))
    if again == "load":
        resumed, loaded = start()
        resumed.load_state_dict(copy.deepcopy(model.state_dict()))
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        resumed, loaded = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(4, 8))
    train(resumed, loaded, range(4, 8))
    assert same(contents(loaded), contents(optimizer))
    assert resumed.weight.equal(model.weight)
    assert not resumed.weight.float().equal(loaded.param_groups[0]["params"][0])  # the master says more


def test_masters_of_other_parameters_are_refused_and_nothing_is_loaded() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 1.0))
    state = optimizer.state_dict()
    state["masters"] = [torch.ones(2)]
    state["loss_scale"]["scale"] = 2.0
    with pytest.raises(LossScaleError, match=r"the state holds 1 masters of 16-bit parameters, this optimizer has 1"):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scaler.value == 2.0**16
    assert optimizer.param_groups[0]["params"][0].equal(model.weight.float())


def test_lbfgs_moves_the_sixteen_bit_weights_between_evaluations() -> None:
    weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float16))
    optimizer = LossScalingOptimizer(torch.optim.LBFGS([weight], 0.5, max_iter=10), DynamicLossScale(2.0**4))
    seen: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        seen.append(weight.detach().clone())
        optimizer.zero_grad()
        loss = weight.float().square().sum()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert len({tuple(w.tolist()) for w in seen}) > 3
    assert weight.abs().max() < 0.1
