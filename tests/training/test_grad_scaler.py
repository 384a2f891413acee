"""A GradScaler trains as torch's does, to the bit, and tells what torch's passes over."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autocastfx import DynamicLossScale, GradScaler, LossScaler, LossScalingOptimizer
from autocastfx.errors import LossScaleError, ScaledGradientsWarning, UnsupportedError

FUSED = pytest.mark.parametrize("fused", [False, True], ids=["host decides", "fused"])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(model: nn.Module, *, fused: bool = False, names: bool = False) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.named_parameters() if names else model.parameters(), lr=0.01, fused=fused)


def made(**options: Any) -> GradScaler:
    return GradScaler("cpu", **options)


def stepped(scaler: Any, model: nn.Module, optimizer: Any, factor: float = 1.0, *, clips: bool = False) -> None:
    """One step of the plain recipe; a factor of inf overflows."""
    optimizer.zero_grad()
    loss = (model(torch.ones(3, 4)) * factor).square().mean()
    scaler.scale(loss).backward()
    if clips:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@FUSED
@pytest.mark.parametrize("clips", [False, True], ids=["as they are", "clipped"])
def test_it_trains_as_torchs_to_the_bit(fused: bool, clips: bool) -> None:
    found = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler, model = kind("cpu", growth_interval=3), net()
        optimizer = adam(model, fused=fused)
        for factor in (1.0, math.inf, 2.0, 0.5, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0):
            stepped(scaler, model, optimizer, factor, clips=clips and not fused)
        state = scaler.state_dict()
        state.pop("skipped_steps", None)
        found.append((state, weights(model)))
    (ours, our_weights), (theirs, their_weights) = found
    assert ours == theirs
    assert all(map(torch.equal, our_weights, their_weights))


def test_it_is_torchs() -> None:
    scaler = made()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.get_scale() == 2.0**16
    assert scaler.is_enabled()


@FUSED
def test_a_skipped_step_changes_nothing_and_is_counted(fused: bool) -> None:
    scaler, model = made(), net()
    optimizer = adam(model, fused=fused, names=True)
    assert not scaler.step_was_skipped
    stepped(scaler, model, optimizer)
    assert not scaler.step_was_skipped
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    stepped(scaler, model, optimizer, math.inf)
    assert scaler.step_was_skipped
    assert scaler.skipped_steps == 1
    assert scaler.get_scale() == 2.0**15
    assert all(map(torch.equal, weights(model), before))
    for mine, theirs in zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert scaler.culprits(optimizer) == ("0.weight", "0.bias", "2.weight", "2.bias")
    stepped(scaler, model, optimizer)
    assert (scaler.step_was_skipped, scaler.skipped_steps) == (False, 1)


def test_the_host_can_be_asked_for_a_fused_optimizer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, model, made_steps = made(), net(), []
    scaler.is_host_asked = True
    optimizer = adam(model, fused=True)
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda *a, **k: made_steps.append(1) or step(*a, **k))
    for factor in (1.0, math.inf, 1.0):
        stepped(scaler, model, optimizer, factor)
    assert len(made_steps) == 2
    assert scaler.skipped_steps == 1
    other, torchs = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(other, fused=True)
    for factor in (1.0, math.inf, 1.0):
        stepped(torchs, other, optimizer, factor)
    for ours, theirs in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(ours, theirs)  # unscaled before the fused kernel, or in it
    with pytest.raises(RuntimeError, match="already been called"):
        _step_twice(scaler, model)


def _step_twice(scaler: GradScaler, model: nn.Module) -> None:
    optimizer = adam(model, fused=True)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


@FUSED
@pytest.mark.parametrize("floor", [1.0, 2.0**-3])
def test_an_overflow_at_the_floor_is_an_error_that_names_the_parameters(fused: bool, floor: float) -> None:
    scaler, model = made(init_scale=4.0, min_scale=floor), net()
    optimizer = adam(model, fused=fused, names=True)
    stepped(scaler, model, optimizer)
    before, falls = weights(model), round(math.log2(4 / floor))
    for _ in range(falls):
        stepped(scaler, model, optimizer, math.inf)
    assert scaler.get_scale() == floor
    with pytest.raises(LossScaleError, match=r"gradients of 0\.weight, .* at its floor"):
        stepped(scaler, model, optimizer, math.inf)
    assert scaler.skipped_steps == falls + 1
    assert all(map(torch.equal, weights(model), before))


def test_the_host_looks_only_where_the_floor_may_be_near(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(GradScaler, "get_scale", lambda self: looks.append(1) or float(self._scale))
    scaler, model = made(growth_interval=10_000), net()
    optimizer = adam(model, fused=True)
    for _ in range(64):
        stepped(scaler, model, optimizer)
    assert len(looks) == 4, "2**16 can be halved 16 times"


def test_it_grows_to_the_ceiling() -> None:
    scaler, model = made(growth_interval=1, max_scale=2.0**18), net()
    optimizer = adam(model)
    for _ in range(5):
        stepped(scaler, model, optimizer)
    assert scaler.get_scale() == 2.0**18


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_loss_of_16_bits_is_widened(low: torch.dtype) -> None:
    losses = torch.tensor([3.0, 0.1], dtype=low, requires_grad=True)
    scaler = made()
    for scaled in (
        scaler.scale(losses),
        scaler.scale([losses])[0],
        scaler.scale({"a": losses})["a"],
        scaler.scale(iter([losses]))[0],
    ):
        assert torch.equal(scaled, losses.float() * 2.0**16)
    with pytest.raises(ValueError, match="a tensor or a tree of tensors, not a float"):
        scaler.scale(1.0)


def test_a_step_without_a_scaled_loss_is_refused() -> None:
    scaler, model = made(), net()
    optimizer = adam(model)
    model(torch.ones(1, 4)).sum().backward()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(LossScaleError, match=r"no loss was scaled since .* scaler\.scale\(loss\)"):
            call(optimizer)
    stepped(scaler, model, optimizer)
    before = weights(model)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(LossScaleError, match="no loss was scaled"):
        scaler.step(optimizer)
    assert all(map(torch.equal, weights(model), before))


@FUSED
def test_a_step_without_gradients_is_refused(fused: bool) -> None:
    scaler, model, other = made(), net(), net()
    optimizer = adam(model, fused=fused)
    scaler.scale(other(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(LossScaleError, match="has no gradients"):
        scaler.step(optimizer)


def test_two_optimizers_share_the_scale() -> None:
    scaler, models = made(), (net(), net())
    optimizers = [adam(model) for model in models]
    losses = [model(torch.ones(1, 4)).sum() * factor for model, factor in zip(models, (1.0, math.inf), strict=True)]
    before = [weights(model) for model in models]
    scaler.scale(losses[0] + losses[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert scaler.skipped_steps == 1
    changed = [not all(map(torch.equal, weights(m), b)) for m, b in zip(models, before, strict=True)]
    assert changed == [True, False]
    scaler.scale(models[0](torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizers[0])
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizers[0])


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_once_and_its_gradients_are_unscaled(by_name: bool) -> None:
    found = []
    for with_closure in (True, False):
        scaler, model, calls = made(), net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure(model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler, calls: Any = calls) -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            scaler.scale(loss).backward()
            return loss.detach()

        if with_closure:
            loss = scaler.step(optimizer, closure=closure) if by_name else scaler.step(optimizer, closure)
        else:
            loss = closure()
            scaler.step(optimizer, None)
        scaler.update()
        found.append((loss, weights(model), len(calls)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert found[0][2] == found[1][2] == 1


def test_optimizers_of_which_it_cannot_undo_a_step_are_refused() -> None:
    scaler, model = made(), net()
    with pytest.raises(UnsupportedError, match=r"LBFGS calls .* LossScalingOptimizer\(LBFGS"):
        scaler.step(torch.optim.LBFGS(model.parameters()), lambda: None)
    wrapped = LossScalingOptimizer(adam(model))
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(UnsupportedError, match="scales its loss by itself"):
            call(wrapped)


@FUSED
def test_gradients_in_float16_are_refused_and_those_in_bfloat16_are_not(fused: bool) -> None:
    for low, refused in ((torch.float16, True), (torch.bfloat16, False)):
        scaler, model = made(), net().to(low)
        optimizer = adam(model, fused=fused, names=True)
        before = weights(model)
        scaler.scale(model(torch.ones(1, 4, dtype=low)).sum()).backward()
        if refused:
            with pytest.raises(LossScaleError, match=r"of 0\.weight, 0\.bias, 2\.weight and 1 more are float16"):
                scaler.step(optimizer)
            assert all(map(torch.equal, weights(model), before))
        else:
            scaler.step(optimizer)


def test_sparse_gradients_are_unscaled() -> None:
    scaler, table = made(), nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with torch.no_grad():
        table.weight.zero_()
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(table.weight.detach(), torch.tensor([[0.0], [-2.0], [0.0], [0.0], [0.0]]).expand(5, 2))


def test_schedulers_do_not_warn_of_a_skipped_first_step() -> None:
    scaler, model = made(), net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped(scaler, model, optimizer, math.inf)
    scheduler.step()


def test_disabled_it_does_nothing() -> None:
    scaler, model = made(enabled=False), net()
    optimizer = adam(model)
    loss = model(torch.ones(1, 4)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    before = weights(model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not all(map(torch.equal, weights(model), before))
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


@pytest.mark.parametrize(
    "options",
    [{"init_scale": 0.0}, {"min_scale": 2.0**17}, {"growth_interval": 0}, {"backoff_factor": 1.0}, {"max_scale": 1.0}],
    ids=str,
)
def test_a_wrong_number_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is a|is between"):
        made(**options)


# ---- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["state dict", "pickle", "torchs", "into torchs"])
def test_a_run_resumes_to_the_bit(by: str) -> None:
    factors = (1.0, math.inf, 1.0, 1.0, math.inf, 1.0, 1.0, 1.0)
    whole, scaler, model = made(growth_interval=3), made(growth_interval=3), net()
    straight, other = net(), net()
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    first, second = adam(straight), adam(model)
    for factor in factors:
        stepped(whole, straight, first, factor)
    begun: Any = theirs if by == "torchs" else scaler
    for factor in factors[:4]:
        stepped(begun, model, second, factor)
    other.load_state_dict(model.state_dict())
    third = adam(other)
    third.load_state_dict(second.state_dict())
    resumed: Any = torch.amp.GradScaler("cpu") if by == "into torchs" else made()
    if by == "pickle":
        resumed = pickle.loads(pickle.dumps(scaler))
    else:
        file = io.BytesIO()
        torch.save(begun.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
    for factor in factors[4:]:
        stepped(resumed, other, third, factor)
    assert all(map(torch.equal, weights(other), weights(straight)))
    assert resumed.get_scale() == whole.get_scale()
    assert resumed._get_growth_tracker() == whole._get_growth_tracker()
    if by in ("state dict", "pickle"):
        assert resumed.skipped_steps == whole.skipped_steps == 2


def test_a_loaded_scale_at_the_floor_is_known() -> None:
    saved, model = made(init_scale=1.0), net()
    scaler, optimizer = made(), adam(model)
    scaler.load_state_dict(saved.state_dict())
    with pytest.raises(LossScaleError, match="at its floor"):
        stepped(scaler, model, optimizer, math.inf)


def test_so_is_one_that_was_set() -> None:
    scaler, model = made(), net()
    optimizer = adam(model)
    stepped(scaler, model, optimizer)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(1.0)
    with pytest.raises(LossScaleError, match="at its floor"):
        stepped(scaler, model, optimizer, math.inf)


def test_the_state_of_a_loss_scaler_is_taken() -> None:
    saved = LossScaler(DynamicLossScale(init=2.0**10))
    scaler = made(growth_interval=7)
    scaler.load_state_dict(saved.state_dict())
    assert scaler.get_scale() == 2.0**10
    assert scaler.get_growth_interval() == 7


@pytest.mark.parametrize("scale", [math.nan, 0.0, 0.5, 2.0**25])
def test_a_state_that_cannot_be_is_refused(scale: float) -> None:
    scaler = made()
    with pytest.raises(LossScaleError, match="scale"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    assert scaler.get_scale() == 2.0**16


# ---- clipped too early ----------------------------------------------------------------------------------------------


@FUSED
def test_gradients_that_are_clipped_while_scaled_are_warned_of(fused: bool) -> None:
    scaler, model = made(), net()
    optimizer = adam(model, fused=fused)
    stepped(scaler, model, optimizer)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.warns(ScaledGradientsWarning, match=r"too small by that factor: call scaler\.unscale_\(optimizer\)"):
        scaler.step(optimizer)
    scaler.update()
    stepped(scaler, model, optimizer)


def test_so_are_those_of_a_wrapped_optimizer() -> None:
    model = net()
    optimizer = LossScalingOptimizer(adam(model))
    optimizer.backward(model(torch.ones(3, 4)).square().mean())
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    with pytest.warns(ScaledGradientsWarning, match=r"call optimizer\.clip_grad_norm_, or optimizer\.unscale_\(\)"):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_other_steps_are_not(set_to_none: bool) -> None:
    scaler, model = made(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = LossScalingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad(set_to_none)
            for _ in range(2):
                scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        for _ in range(3):
            wrapped.zero_grad(set_to_none)
            for _ in range(2):
                wrapped.backward(model(torch.ones(3, 4)).square().mean())
            wrapped.clip_grad_norm_(1.0)
            wrapped.step()


def test_an_optimizer_that_is_gone_leaves_no_hook() -> None:
    model = net()
    for _ in range(3):
        LossScalingOptimizer(adam(model))
    scaler = made()
    stepped(scaler, model, adam(model))
    del scaler
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks)


def test_gradients_that_can_be_differentiated_again_are_refused() -> None:
    scaler, weight = made(), nn.Parameter(torch.ones(3))
    (weight.grad,) = torch.autograd.grad(scaler.scale(weight.square().sum()), weight, create_graph=True)
    with pytest.raises(LossScaleError, match="derivatives of them would keep the loss scale"):
        scaler.step(torch.optim.SGD([weight], 0.1))
    weight.grad = None  # or the graph of the gradient lives on
