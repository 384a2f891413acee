"""Float32 masters of a model whose weights have 16 bits."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autocastfx import DynamicLossScale, LossScalingOptimizer, NoLossScale
from autocastfx.errors import LossScaleError
from tests.training.test_optimizer import OPTIMIZERS, Make, contents, same

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
                (master, _) = optimizer.param_groups[0]["params"]
                assert model.weight.grad is master.grad
                assert master.grad.dtype == torch.float32
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
    optimizer.backward(model(ones()))
    optimizer.accumulate()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in (*optimizer.masters.working, *optimizer.masters.masters))


Pair = tuple[Mixed, LossScalingOptimizer]


def _start() -> Pair:
    model = Mixed(torch.float16)
    return model, LossScalingOptimizer(torch.optim.Adam(model.parameters(), 1e-4), DynamicLossScale(2.0**4))


def _train(pair: Pair, steps: range, bad: int = 2) -> None:
    model, optimizer = pair
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(model(ones() * (math.inf if step == bad else 1 + step)))
        optimizer.step()
        assert optimizer.last_step.skipped == (step == bad)


def _load(pair: Pair) -> Pair:
    model, optimizer = _start()
    model.load_state_dict(copy.deepcopy(pair[0].state_dict()))
    optimizer.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    return model, optimizer


def _load_optimizer_first(pair: Pair) -> Pair:
    model, optimizer = _start()
    optimizer.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    model.load_state_dict(copy.deepcopy(pair[0].state_dict()))
    return model, optimizer


AGAIN: dict[str, Callable[[Pair], Pair]] = {
    "loaded": _load,
    "loaded, optimizer first": _load_optimizer_first,
    "copied": copy.deepcopy,
    "pickled": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
def test_resuming_is_never_having_stopped(again: Callable[[Pair], Pair]) -> None:
    pair = _start()
    _train(pair, range(4))
    model, optimizer = pair
    assert not model.weight.float().equal(optimizer.param_groups[0]["params"][0])  # the master says more
    resumed = again(pair)
    _train(pair, range(4, 8))
    _train(resumed, range(4, 8))
    assert same(contents(resumed[1]), contents(optimizer))
    assert resumed[0].weight.equal(model.weight)


# ---- what the model's owner does to its parameters -----------------------------------------------------------------


def test_the_master_of_a_frozen_parameter_is_frozen_from_the_start() -> None:
    optimizer = LossScalingOptimizer(torch.optim.SGD(Mixed(torch.float16).parameters(), 0.25))
    assert [p.requires_grad for p in optimizer.param_groups[0]["params"]] == [True, True, False]


def test_a_parameter_that_is_unfrozen_moves_with_its_master() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), 0.25), DynamicLossScale(2.0**4))
    master = optimizer.param_groups[0]["params"][2]
    for is_frozen, expected in [(True, 1.0), (False, 0.75), (False, 0.5), (True, 0.5)]:
        model.frozen.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        optimizer.backward(model(ones()) + model.frozen.float().sum())
        optimizer.step()
        assert not optimizer.last_step.skipped
        assert model.frozen.eq(expected).all()
        assert master.eq(expected).all()
        assert master.requires_grad != is_frozen


def test_a_parameter_that_is_frozen_after_going_backward_moves_with_its_master() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 0.25), DynamicLossScale(2.0**4))
    before = model.weight.detach().clone()
    optimizer.backward(model(ones()))
    model.weight.requires_grad_(False)
    optimizer.step()
    assert model.weight.equal(optimizer.param_groups[0]["params"][0].half())
    assert not model.weight.equal(before)


def test_an_average_that_is_swapped_in_is_trained_on_and_one_that_is_swapped_out_leaves_no_trace() -> None:
    pair, plain = _start(), _start()
    for one in (pair, plain):
        _train(one, range(2))
    model, optimizer = pair
    own = model.weight.data
    model.weight.data = torch.zeros_like(own)
    model.weight.data = own
    for one in (pair, plain):
        _train(one, range(3, 5))
    assert same(contents(optimizer), contents(plain[1]))
    model.weight.data = torch.full_like(model.weight, 3.0)
    optimizer.zero_grad()
    optimizer.backward(model(ones()))
    optimizer.step()
    assert (model.weight - 3).abs().max() < 2e-3
    assert model.weight.equal(optimizer.param_groups[0]["params"][0].half())


def test_a_state_holds_weights_that_were_changed_since_the_last_step() -> None:
    pair = _start()
    _train(pair, range(2))
    with torch.no_grad():
        pair[0].weight.fill_(3.0)
    assert pair[1].state_dict()["masters"][0].eq(3.0).all()


def test_lbfgs_starts_from_weights_that_were_changed_since_the_last_step() -> None:
    weight = nn.Parameter(torch.tensor([3.0], dtype=torch.float16))
    optimizer = LossScalingOptimizer(torch.optim.LBFGS([weight], 0.5, max_iter=2), DynamicLossScale(2.0**4))
    seen: list[float] = []

    def closure() -> torch.Tensor:
        seen.append(float(weight.detach()))
        optimizer.zero_grad()
        loss = (weight.float() * (math.inf if weight > 5 else 1.0)).square().sum()
        optimizer.backward(loss)
        return loss

    for start in (2.0, 6.0):
        weight.data = torch.tensor([start], dtype=torch.float16)
        first = len(seen)
        optimizer.step(closure)
        assert seen[first] == start
    assert optimizer.last_step.skipped
    assert weight == 6.0


def test_the_state_of_a_bare_optimizer_makes_masters_of_the_present_weights() -> None:
    model, optimizer = _start()
    _train((model, optimizer), range(2))
    master = optimizer.param_groups[0]["params"][0]
    assert not master.equal(model.weight.float())
    bare = torch.optim.Adam(Mixed(torch.float16).parameters(), 1e-3)
    optimizer.load_state_dict(bare.state_dict())
    assert master.equal(model.weight.float())


@pytest.mark.parametrize("named", [False, True])
def test_a_parameter_that_it_has_is_not_added_again(named: bool) -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([("weight", model.weight)] if named else [model.weight], 1.0))
    added = {"params": [("scale", model.scale), ("again", model.weight)] if named else [model.scale, model.weight]}
    with pytest.raises(ValueError, match=r"parameter 1 of shape \(4, 3\) is in another group already, by its master"):
        optimizer.add_param_group(added)
    assert len(optimizer.param_groups) == len(optimizer.masters) == 1


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_a_group_has_twice_has_one_master() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = LossScalingOptimizer(torch.optim.SGD([weight, weight], 1.0))
    first, second = optimizer.param_groups[0]["params"]
    assert first is second
    assert len(optimizer.masters) == 1


def test_sparse_gradients_add_up_and_are_unscaled_once() -> None:
    embedding = nn.Embedding(5, 2, sparse=True, dtype=torch.float16)
    nn.init.ones_(embedding.weight)
    optimizer = LossScalingOptimizer(torch.optim.SGD(embedding.parameters(), 0.25), DynamicLossScale(2.0**4))
    for _ in range(2):
        optimizer.backward(embedding(torch.tensor([1, 3, 1])).float().sum())
        optimizer.accumulate()
    optimizer.unscale_()
    optimizer.step()
    assert embedding.weight[:, 0].tolist() == [1, 0, 1, 0.5, 1]


# ---- what the model's owner does to its gradients ------------------------------------------------------------------


def test_clipping_the_models_gradients_clips_the_masters() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), 1.0), DynamicLossScale(2.0**4))
    bare = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer.backward(model(ones()))
    optimizer.unscale_()
    for parameter, plain in zip(model.parameters(), bare, strict=True):
        plain.grad = parameter.grad.clone() if parameter.grad is not None else None
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 0.5
    assert norm.equal(torch.nn.utils.clip_grad_norm_(bare, 0.5))
    optimizer.step()
    torch.optim.SGD(bare, 1.0).step()
    assert same(contents(optimizer), [p.detach() for p in bare])


def test_gradients_that_the_model_drops_its_masters_drop() -> None:
    def step(*, drops: str) -> list[torch.Tensor]:
        model = Mixed(torch.float16)
        optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), 2.0**-4), DynamicLossScale(2.0**4))
        if drops != "never":
            optimizer.backward(model(ones()) * 8)
        if drops == "after a step":
            optimizer.step()
            model.load_state_dict(Mixed(torch.float16).state_dict())
        if drops == "after unscaling":
            optimizer.unscale_()
            optimizer._forget()  # which scale_loss asks for, by optimizer.zero_grad()
        if drops.startswith("after adding up"):
            optimizer.accumulate()
        model.zero_grad(set_to_none=not drops.endswith("by zeros"))
        optimizer.backward(model(ones()))
        optimizer.step()
        return contents(optimizer)

    expected = step(drops="never")
    for drops in ("before a step", "after a step", "after unscaling", "after adding up", "after adding up, by zeros"):
        assert same(step(drops=drops), expected), drops


@pytest.mark.parametrize("replacement", ["None", "other"])
def test_a_gradient_that_is_replaced_after_unscaling_is_taken(replacement: str) -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 1.0), DynamicLossScale(2.0**4))
    before = model.weight.detach().clone()
    optimizer.backward(model(ones()))
    optimizer.unscale_()
    model.weight.grad = None if replacement == "None" else torch.full((4, 3), 0.25)
    optimizer.step()
    assert model.weight.equal(before if replacement == "None" else before - 0.25)


def test_a_gradient_that_the_master_alone_was_given_is_taken() -> None:
    model = Mixed(torch.float16)
    optimizer = LossScalingOptimizer(torch.optim.SGD([model.weight], 1.0), NoLossScale())
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["params"][0].grad = torch.full((4, 3), 0.25)
    optimizer.step()
    assert model.weight.equal(before - 0.25)
    optimizer.zero_grad()
    model.weight.grad = torch.full((4, 3), 0.25, dtype=torch.float16)
    optimizer.param_groups[0]["params"][0].grad = torch.full((4, 3), 0.5)
    optimizer.step()
    assert model.weight.equal(before - 1)


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


class Averaging(torch.optim.SGD):
    """Trains its weights, and swaps them for their average outside of steps, as schedule-free optimizers do."""

    def swap(self, *, by_data: bool = False) -> None:
        for p in self.param_groups[0]["params"]:
            other = self.state[p].setdefault("average", p.detach().clone() + 1)
            before = p.detach().clone()
            (p.data if by_data else p.detach()).copy_(other)
            other.copy_(before)

    def train(self) -> None:
        """Read no gradients, as schedule-free optimizers in this method."""

    def look(self) -> float:
        return float(self.param_groups[0]["lr"])


@pytest.mark.parametrize("masters", ["float32", "split"])
@pytest.mark.parametrize("by_data", [False, True])
def test_weights_that_a_method_swaps_reach_the_model(masters: str, by_data: bool) -> None:
    model = Mixed(torch.bfloat16)
    optimizer = LossScalingOptimizer(Averaging([model.weight], 0.5), NoLossScale(), masters=masters)
    start = model.weight.detach().clone()
    optimizer.swap(by_data=by_data)
    assert torch.equal(model.weight, start + 1)
    optimizer.swap(by_data=by_data)
    assert torch.equal(model.weight, start)
    optimizer.backward(model(ones()))
    optimizer.step()
    trained = model.weight.detach().clone()
    optimizer.swap(by_data=by_data)
    assert torch.equal(model.weight, start + 1)
    optimizer.swap(by_data=by_data)
    assert torch.equal(model.weight, trained)


def test_a_method_that_writes_nothing_leaves_the_graph_of_a_loss_alone() -> None:
    model = Mixed(torch.bfloat16)
    optimizer = LossScalingOptimizer(Averaging([model.weight, model.scale], 0.5))
    loss = model(ones())
    assert optimizer.look() == 0.5
    optimizer.backward(loss)
    optimizer.train()  # before another micro-batch
    optimizer.backward(model(ones()))
    optimizer.step()
    assert not optimizer.last_step.skipped


class Curved(torch.optim.SGD):
    """Estimates curvature from gradients between steps, as Sophia does."""

    def estimate(self) -> list[torch.Tensor]:
        return [p.grad.square() for p in self.param_groups[0]["params"] if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_method_sees_gradients_without_the_scale_or_is_refused(dtype: torch.dtype) -> None:
    model = Mixed(dtype)
    optimizer = LossScalingOptimizer(Curved([model.weight], 0.5))
    optimizer.backward(model(ones()))
    with pytest.raises(LossScaleError, match=r"estimate may read gradients that the loss scale still multiplies: call"):
        optimizer.estimate()
    optimizer.unscale_()
    assert torch.equal(optimizer.estimate()[0], torch.full((4, 3), 4.0))
    optimizer.zero_grad()
    optimizer.estimate()
    plain = LossScalingOptimizer(Curved([(other := Mixed(dtype)).weight], 0.5), NoLossScale())
    plain.backward(other(ones()))
    assert torch.equal(plain.estimate()[0], torch.full((4, 3), 4.0, dtype=torch.float32))


def test_an_optimizer_may_write_the_parameters_that_agree_with_their_masters() -> None:
    parameters = [nn.Parameter(torch.randn(3).bfloat16()) for _ in range(2)]
    masters = LossScalingOptimizer(torch.optim.SGD(parameters, 0.1)).masters
    given = {id(master): master for master in masters.masters}
    assert given
    written = masters.writable(given)
    assert [written[id(master)] for master in masters.masters] == masters.working
    with torch.no_grad():
        parameters[0].add_(1)
    assert list(masters.writable(given)) == [id(masters.masters[1])]


def test_a_step_writes_into_no_frozen_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[0].requires_grad_(requires_grad=False)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), 1.0), NoLossScale())
    before = [p._version for p in model.parameters()]
    optimizer.backward(model(torch.ones(2, 4, dtype=torch.float16)).sum())
    optimizer.step()
    assert [now > was for now, was in zip((p._version for p in model.parameters()), before, strict=True)] == [
        *(False, False, True, True)
    ]
