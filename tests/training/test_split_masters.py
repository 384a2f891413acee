"""Masters in four bytes are those in six to the bit, whatever is done with the optimizer."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autocastfx import DynamicLossScale, LossScalingOptimizer, NoLossScale
from autocastfx.errors import LossScaleError, UnsupportedError
from autocastfx.training.split_masters import SplitMasters, join, split
from benchmarks.memory import peak

LOW = torch.bfloat16
Make = Callable[[Any], Optimizer]
FOREACH = [
    "Adafactor",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
FUSED = ["Adagrad", "Adam", "AdamW", "SGD"]
OPTIMIZERS: dict[str, Make] = {
    **{f"{n} foreach": lambda p, n=n: getattr(optim, n)(p, lr=0.01, foreach=True) for n in (*FOREACH, "SGD")},
    **{f"{n} fused": lambda p, n=n: getattr(optim, n)(p, lr=0.01, fused=True) for n in FUSED},
    "SGD momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01, foreach=False),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "two groups": lambda p: optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 0.1}], lr=0.01),
}
SHAPES = ((4, 3), (3,), (2, 2, 2), (5,))
FLOAT32 = 1  # the number of the parameter that is float32


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(LOW)) for shape in SHAPES]
    made[FLOAT32] = nn.Parameter(made[FLOAT32].detach().float())
    return made


def wrapped(make: Make, masters: str) -> tuple[list[nn.Parameter], LossScalingOptimizer]:
    own = parameters()
    return own, LossScalingOptimizer(make(own), DynamicLossScale(2.0**4, interval=2), masters=masters)


def state_of(optimizer: LossScalingOptimizer) -> list[Tensor]:
    """All masters, float32 parameters and optimizer state."""
    held = optimizer.state_dict()
    states = [held["state"][index][name] for index in sorted(held["state"]) for name in sorted(held["state"][index])]
    return [*held["masters"], *(value for value in states if isinstance(value, Tensor))]


def backward(optimizer: LossScalingOptimizer, own: Sequence[nn.Parameter], seed: int, bad: bool) -> None:
    """Give the parameters gradients that do not depend on them: weights of the two kinds of masters differ in ties."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).float().sum() for p in own)
    optimizer.backward(loss * (math.inf if bad else 1))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitMasters, "most", 9)  # of 12, 8 and 5 numbers


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fifty_steps_are_those_of_masters_in_float32(make: Make) -> None:
    """With overflows, clipping, gradients of two batches added up, and a checkpoint in the middle."""
    runs = [wrapped(make, masters) for masters in ("float32", "split")]
    for step in range(50):
        for number, (own, optimizer) in enumerate(runs):
            optimizer.zero_grad()
            backward(optimizer, own, step, bad=step % 7 == 0)
            if step % 3 == 0:
                optimizer.accumulate()
                backward(optimizer, own, 100 + step, bad=False)
            if step % 5 == 0:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            if step == 25:
                saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
                again, other = wrapped(make, "split" if number else "float32")
                again[FLOAT32].data.copy_(own[FLOAT32])
                other.load_state_dict(saved)
                runs[number] = again, other
        (theirs, full), (own, optimizer) = runs
        if step != 25:  # there they are new
            assert optimizer.last_step.skipped == full.last_step.skipped == (step % 7 == 0)
        assert all(map(torch.equal, state_of(optimizer), state_of(full)))
        assert torch.equal(own[FLOAT32], theirs[FLOAT32])
        for parameter, master in zip((own[0], *own[2:]), optimizer.state_dict()["masters"], strict=True):
            assert (parameter - master).abs().le(torch.finfo(LOW).eps / 2 * master.abs()).all()


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_number_is_what_it_was(bits: int) -> None:
    number = torch.tensor([bits], dtype=torch.int32)
    weight, rest = torch.empty(1, dtype=LOW), torch.empty(1, dtype=torch.int16)
    split(number.clone().view(torch.float32), weight, rest)
    value = number.view(torch.float32)
    if value.isnan():
        assert weight.isnan()
        assert join(weight, rest).isnan()
        return
    assert torch.equal(join(weight, rest).view(torch.int32), number)
    nearest = value.to(LOW)
    is_tie = bits & 0xFFFF == 0x8000
    assert torch.equal(weight, nearest) or (is_tie and weight.abs() > nearest.abs())


def test_all_halves_and_all_weights() -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = (upper << 16) + lower
        weight, rest = torch.empty(2**16, dtype=LOW), torch.empty(2**16, dtype=torch.int16)
        split(numbers.clone().view(torch.float32), weight, rest)
        joined, values = join(weight, rest), numbers.view(torch.float32)
        are_nan = values.isnan()
        assert torch.equal(joined.view(torch.int32)[~are_nan], numbers[~are_nan])
        assert weight[are_nan].isnan().all()
        assert joined[are_nan].isnan().all()


@pytest.mark.usefixtures("small_parts")
def test_a_copy_and_a_pickle_go_on_alike() -> None:
    own, optimizer = wrapped(OPTIMIZERS["AdamW fused"], "split")
    backward(optimizer, own, 0, bad=False)
    optimizer.step()
    copied_own, copied = copy.deepcopy((own, optimizer))
    pickled_own, pickled = pickle.loads(pickle.dumps((own, optimizer)))
    for number, (some, one) in enumerate(((own, optimizer), (copied_own, copied), (pickled_own, pickled))):
        one.zero_grad()
        backward(one, some, 1, bad=False)
        one.step()
        assert all(map(torch.equal, state_of(one), state_of(optimizer))), number
        masters = [p for group in one.param_groups for p in group["params"] if p.shape != SHAPES[FLOAT32]]
        assert all(m.isnan().all() and m.untyped_storage().nbytes() == 4 for m in masters)


def test_runs_of_the_other_kind_are_gone_on_with() -> None:
    own, full = wrapped(OPTIMIZERS["AdamW foreach"], "float32")
    backward(full, own, 0, bad=False)
    full.step()
    other, optimizer = wrapped(OPTIMIZERS["AdamW foreach"], "split")
    optimizer.load_state_dict(full.state_dict())
    assert all(map(torch.equal, state_of(optimizer), state_of(full)))
    back = wrapped(OPTIMIZERS["AdamW foreach"], "float32")[1]
    back.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, state_of(back), state_of(full)))
    bare = optim.AdamW([p.detach().clone().requires_grad_() for p in other], lr=0.01, foreach=True)
    optimizer.load_state_dict(bare.state_dict())
    kept = optimizer.state_dict()["masters"]
    assert all(torch.equal(m, p.float()) for m, p in zip(kept, (other[0], *other[2:]), strict=True))


def test_the_rest_stays_when_a_parameter_is_written() -> None:
    own, optimizer = wrapped(OPTIMIZERS["SGD foreach"], "split")
    backward(optimizer, own, 0, bad=False)
    optimizer.step()
    before = state_of(optimizer)
    averages = [p.detach().clone() for p in own]
    with torch.no_grad():
        for parameter in own:
            parameter.zero_()
        for parameter, average in zip(own, averages, strict=True):
            parameter.copy_(average)
    assert all(map(torch.equal, state_of(optimizer), before))
    for value in (3.0, 0.0, -0.0, math.inf, -math.inf, 2.0**-133, torch.finfo(LOW).max):
        with torch.no_grad():
            own[0].fill_(value)
        (master, *_) = optimizer.state_dict()["masters"]
        assert torch.equal(master.to(LOW).view(torch.int16), own[0].view(torch.int16))


def test_every_weight_with_every_kind_of_rest_rounds_to_the_weight() -> None:
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(LOW)
    for rest in (-(2**15), -1, 0, 1, 2**15 - 1):
        rests = torch.full((2**16,), rest, dtype=torch.int16)
        joined = join(weights, rests)
        again, kept = torch.empty_like(weights), torch.empty_like(rests)
        split(joined.clone(), again, kept)
        are_nan = weights.isnan()
        assert torch.equal(again.isnan(), are_nan)
        assert torch.equal(again.view(torch.int16)[~are_nan], weights.view(torch.int16)[~are_nan])


def test_frozen_parameters_and_those_without_gradients_stay() -> None:
    own, optimizer = wrapped(OPTIMIZERS["AdamW foreach"], "split")
    before = optimizer.state_dict()["masters"]
    own[0].requires_grad_(False)
    optimizer.backward((own[2].float() ** 2).sum())
    optimizer.step()
    after = optimizer.state_dict()["masters"]
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, False, True]
    assert not optimizer.param_groups[0]["params"][0].requires_grad


def test_a_new_group_is_split_too() -> None:
    own, optimizer = wrapped(lambda p: optim.SGD(p[:2], lr=1.0), "split")
    optimizer.add_param_group({"params": own[2:]})
    backward(optimizer, own, 0, bad=False)
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert len(optimizer.state_dict()["masters"]) == 3
    with pytest.raises(UnsupportedError, match=r"one of shape \(2,\) is float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 2


# -- what an optimizer keeps for all parameters -----------------------------------------------------------------------


class Counting(optim.SGD):
    """Counts its steps in each group and in itself, and decays its rate by them."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps = self.steps + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (group["k"] + self.steps))


class Adapting(optim.SGD):
    """Chooses its rate by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["norm"] = float(sum(p.grad.norm() for p in group["params"] if p.grad is not None))
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["norm"])


class AdaptingTensor(optim.SGD):
    """Keeps what it adapts in a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"].mul_(0.5)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"])


class Clipping(optim.SGD):
    """Divides by the norm of all gradients, which it keeps nowhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm)


class Naming(optim.SGD):
    """Chooses its rate by the place of a parameter, and moves those without gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> int:
        group = self.param_groups[0]
        for place, p in enumerate(group["params"]):
            p.sub_(group["lr"] * (place + 1) * (torch.ones_like(p) if p.grad is None else p.grad))
        return len(group["params"])


SEEING = [Counting, Adapting, Clipping, Naming, lambda p, lr: AdaptingTensor(p, lr=torch.tensor(lr))]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("make", SEEING)
def test_an_optimizer_that_nobody_knows_sees_all_masters_at_once(make: Any) -> None:
    runs = [wrapped(lambda p: make(p, lr=0.1), masters) for masters in ("float32", "split")]
    for step in range(3):
        results = []
        for own, optimizer in runs:
            optimizer.zero_grad()
            backward(optimizer, own[: 2 + step], step, bad=False)  # at first not all have gradients
            results.append(optimizer.step())
        assert results[0] == results[1]
    (_, full), (_, optimizer) = runs
    assert all(map(torch.equal, state_of(optimizer), state_of(full)))
    for group, other in zip(optimizer.param_groups, full.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


def parts_of(optimizer: LossScalingOptimizer, own: Sequence[nn.Parameter]) -> int:
    """How often the wrapped optimizer steps in one step."""
    parts, step_of = list[int](), SplitMasters._step_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitMasters, "_step_of", lambda *a: (parts.append(1), step_of(*a))[1])
        optimizer.zero_grad()
        backward(optimizer, own, 0, bad=False)
        optimizer.step()
    return len(parts)


@pytest.mark.usefixtures("small_parts")
def test_hooks_and_replaced_steps_see_one_step_and_what_masters_are() -> None:
    own, optimizer = wrapped(lambda p: optim.SGD(p, lr=0.1), "split")
    assert parts_of(optimizer, own) == 3
    optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
    assert parts_of(optimizer, own) == 3
    kept = list[list[Tensor]]()
    handle = optimizer.optimizer.register_step_post_hook(lambda *_: kept.append(optimizer.masters.state()))
    assert parts_of(optimizer, own) == 1
    assert all(map(torch.equal, kept[0], optimizer.masters.state()))
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert parts_of(optimizer, own) == 1
    handle.remove()
    assert parts_of(optimizer, own) == 3
    replaced = optimizer.optimizer.step
    optimizer.optimizer.step = lambda *_: replaced()
    assert parts_of(optimizer, own) == 1


# -- refusal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "make", "masters", "error", "said"),
    [
        (torch.float16, optim.SGD, "split", UnsupportedError, "is for bfloat16 parameters, and one of shape"),
        (torch.float32, optim.SGD, "split", ValueError, "and the optimizer has none"),
        (LOW, optim.LBFGS, "split", UnsupportedError, "LBFGS moves all parameters together"),
        (LOW, optim.SGD, "int8", ValueError, "masters is one of 'float32', 'split', not 'int8'"),
    ],
)
def test_what_cannot_be_split_is_refused(
    dtype: torch.dtype, make: Any, masters: str, error: type[Exception], said: str
) -> None:
    own = [
        nn.Parameter(torch.ones(2, dtype=LOW if dtype == torch.float16 else dtype)),
        nn.Parameter(torch.ones(3, dtype=dtype)),
    ]
    bare = make(own, lr=0.1)
    with pytest.raises(error, match=said):
        LossScalingOptimizer(bare, masters=masters)
    assert [id(p) for group in bare.param_groups for p in group["params"]] == list(map(id, own))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill_": lambda master: master.fill_(2),
    "zero_": lambda master: master.zero_(),
    "of one element": lambda master: master[:1].mul_(2),
    "data": lambda master: setattr(master, "data", torch.ones(master.shape)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_master_that_is_written_between_steps_is_refused(write: Callable[[Tensor], object]) -> None:
    own = [nn.Parameter(torch.ones(4, dtype=LOW))]
    optimizer = LossScalingOptimizer(optim.SGD(own, lr=0.1), masters="split")
    (master,) = optimizer.param_groups[0]["params"]
    assert master.isnan().all()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="more than one element"):
            master.mul_(2)
        write(master)
    optimizer.backward(own[0].float().sum())
    with pytest.raises(LossScaleError, match="was written between steps, where masters='split' keeps none"):
        optimizer.step()
    assert own[0].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_parameter_that_is_no_longer_bfloat16_is_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = LossScalingOptimizer(optim.SGD(model.parameters(), lr=0.1), NoLossScale(), masters="split")
    model.to(dtype)
    optimizer.backward(model(torch.ones(1, 4, dtype=dtype)).float().sum())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(LossScaleError, match=r"a parameter that was bfloat16 of shape \(4, 4\) is float"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("masters", ["float32", "split"])
def test_an_optimizer_that_holds_masters_is_not_wrapped_again(masters: str) -> None:
    bare = optim.SGD([nn.Parameter(torch.ones(2, dtype=LOW))], lr=0.1)
    LossScalingOptimizer(bare, masters=masters)
    for again in ("float32", "split"):
        with pytest.raises(UnsupportedError, match="holds the masters of that wrapper"):
            LossScalingOptimizer(bare, masters=again)
    plain = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    LossScalingOptimizer(plain)
    LossScalingOptimizer(plain)  # without masters nothing is between it and the model


def test_a_step_that_fails_leaves_the_rest_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitMasters, "most", 9)
    own, optimizer = wrapped(OPTIMIZERS["SGD foreach"], "split")
    before = state_of(optimizer)
    backward(optimizer, own, 0, bad=False)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(optimizer.optimizer, "step", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    assert all(map(torch.equal, state_of(optimizer), before))


def test_a_step_needs_the_memory_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 16
    monkeypatch.setattr(SplitMasters, "most", most)
    own = [nn.Parameter(torch.randn(most, dtype=LOW)) for _ in range(6)]
    optimizer = LossScalingOptimizer(optim.AdamW(own, fused=True), masters="split")
    for _ in range(2):  # the first makes the optimizer's state
        optimizer.zero_grad()
        optimizer.backward(sum(p.float().square().sum() for p in own))
        optimizer.unscale_()  # gradients in float32 are there before the step
        needed = peak(optimizer.step, lambda: None)
    assert 4 * most <= needed <= 8 * most, needed  # a part in float32, and on a CPU its rests in four bytes


def test_a_small_model_is_updated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, optimizer = wrapped(OPTIMIZERS["SGD foreach"], "split")
    calls, step = list[int](), optimizer.optimizer.step
    monkeypatch.setattr(optimizer.optimizer, "step", lambda: (calls.append(1), step()))
    backward(optimizer, own, 0, bad=False)
    optimizer.step()
    assert calls == [1]


@pytest.mark.parametrize(
    ("most", "sizes"), [(20, [[12, 8], [5]]), (13, [[12], [8, 5]]), (12, [[12], [8], [5]]), (1, [[12], [8], [5]])]
)
def test_a_part_holds_as_many_numbers_as_it_may(
    most: int, sizes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SplitMasters, "most", most)
    own, optimizer = wrapped(OPTIMIZERS["SGD foreach"], "split")
    backward(optimizer, own, 0, bad=False)
    optimizer.unscale_()
    masters: Any = optimizer.masters
    parts = masters._parts([group["params"] for group in optimizer.param_groups])
    assert [[masters.rests[index].numel() for index in part] for part in parts] == sizes


def test_a_master_without_gradient_takes_no_memory_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    own, optimizer = wrapped(lambda p: optim.SGD(p, lr=0.1), "split")
    shown, show = list[int](), SplitMasters._show
    monkeypatch.setattr(SplitMasters, "_show", lambda self, index: (shown.append(index), show(self, index)))
    optimizer.backward(own[2].float().sum())
    optimizer.step()
    assert shown == [1]
    optimizer.zero_grad()
    backward(optimizer, own[1:2], 0, bad=False)  # of float32
    optimizer.step()
    assert shown == [1]
