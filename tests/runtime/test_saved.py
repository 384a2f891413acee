"""What is kept for backward: forward to the bit, gradients to the bit or within the form's error, and fewer bytes."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx import AmpModule
from autocastfx.errors import UnmatchedRuleWarning
from autocastfx.policy.saved import Keep
from autocastfx.runtime import saved
from benchmarks.step_counts import Saved, count

EPS8 = 2**-4  # half of e4m3's step


class Layer(nn.Module):
    """A transformer's layer with dropout, and norms before its parts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        scores = self.q(y) @ self.k(y).transpose(-1, -2) / 4
        x = x + self.drop(self.o(self.drop(scores.softmax(-1)) @ self.v(y)))
        y: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))
        return y


class Layers(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Images(nn.Module):
    """Convolutions whose activations are written into, beside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 3)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.a(x)), inplace=True)
        x = functional.silu(self.b(x)).clone().mul_(2)
        return self.c(x.to(memory_format=torch.channels_last)).relu().mean()


@pytest.fixture(scope="module")
def model() -> Layers:
    torch.manual_seed(0)
    return Layers().train()


@pytest.fixture(scope="module")
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 64, 32)


def converted(model: nn.Module, x: Tensor, saved: Any = "as computed", **options: Any) -> AmpModule:
    return autocastfx.convert(model, (x,), **{"dtype": torch.bfloat16, "saved": saved, "check": False, **options})


Kept = Callable[[str], AmpModule]


@pytest.fixture(scope="module")
def kept(model: Layers, x: Tensor) -> Kept:
    """The model, converted once for each way to keep: no test here changes what it computes."""
    return functools.cache(functools.partial(converted, model, x))


def step(
    amp_model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None
) -> tuple[Tensor, list[Tensor], Saved]:
    """A loss, all gradients, and what backward holds, from the same random numbers each time."""
    torch.manual_seed(2)
    amp_model.zero_grad()
    made: list[Tensor] = []
    found = count(amp_model, [x], lambda: made.append((call or amp_model)(x))).saved()
    made[0].backward()
    gradients = [p.grad.clone() for p in amp_model.parameters() if p.grad is not None]
    return made[0].detach(), gradients, found


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    moved = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return float((moved / sum(float(y.double().square().sum()) for y in b)) ** 0.5)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_what_is_recomputed_is_the_same_to_the_bit(model: Layers, kept: Kept, x: Tensor, weights: str) -> None:
    make = kept if weights == "cast" else functools.partial(converted, model, x, weights=weights)
    before, after = step(make("as computed"), x), step(make("recompute"), x)
    assert torch.equal(before[0], after[0])
    assert equal(before[1], after[1])
    assert after[2].activations < 0.5 * before[2].activations


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_too_with_its_masks_of_dropout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers, batch = Layers().train().cuda(), torch.randn(4, 64, 32, device="cuda")
    before = step(converted(layers, batch, dtype=dtype), batch)
    after = step(converted(layers, batch, "recompute", dtype=dtype), batch)
    assert torch.equal(before[0], after[0])
    assert equal(before[1], after[1])
    assert after[2].activations < 0.6 * before[2].activations


@pytest.mark.parametrize("saved", ["low", "float8"])
def test_fewer_bits_change_gradients_alone(kept: Kept, x: Tensor, saved: str) -> None:
    before, after = step(kept("as computed"), x), step(kept(saved), x)
    assert torch.equal(before[0], after[0])
    assert 0 < distance(after[1], before[1]) < (EPS8 if saved == "float8" else 2**-8)
    assert after[2].activations < before[2].activations


def test_random_numbers_go_on_as_without_it(kept: Kept, x: Tensor) -> None:
    states = []
    for keep in ("as computed", "recompute"):
        step(kept(keep), x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_what_is_written_into_stays(x: Tensor) -> None:
    torch.manual_seed(0)
    images, batch = Images().train(), torch.randn(8, 3, 12, 12)
    before = step(converted(images, batch), batch)
    for keep in ("recompute", "low", "float8"):
        loss, gradients, _ = step(converted(images, batch, keep), batch)
        assert torch.equal(loss, before[0])
        assert equal(gradients, before[1]) == (keep != "float8")  # whose values are all 16-bit here
        assert distance(gradients, before[1]) < EPS8


def test_float8_has_a_scale_for_each_row() -> None:
    value = torch.tensor([[1e-6, 2e-6, -3e-6, 0.0], [5.0, -7.0, 300.0, 1e4]])
    form = saved.FORMS[Keep.FLOAT8]
    restored = form.unpack(value.dtype, form.pack(value))
    assert (restored[0] - value[0]).abs().max() <= EPS8 * value[0].abs().max()
    torch.testing.assert_close(restored[1, 2:], value[1, 2:], rtol=EPS8, atol=0)
    assert form.unpack(value.dtype, form.pack(torch.zeros(2, 4))).equal(torch.zeros(2, 4))


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (2, 4, 3, 8)])
def test_strides_stay(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    for layout in (value, value.transpose(0, -1), value.flip(0)):
        for keep, form in saved.FORMS.items():
            assert form.unpack(layout.dtype, form.pack(layout)).stride() == layout.stride(), keep


# -- beside other users of autograd's hooks ---------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["recompute", "float8"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kept: Kept, x: Tensor, saved: str, reentrant: bool) -> None:
    amp_model, x = kept(saved), x.clone().requires_grad_()
    plain = step(amp_model, x)
    checked = step(amp_model, x, lambda x: checkpoint(amp_model, x, use_reentrant=reentrant))
    assert torch.equal(plain[0], checked[0])
    assert equal(plain[1], checked[1])
    assert checked[2].activations < 0.1 * plain[2].activations


def test_save_on_cpu(kept: Kept, x: Tensor) -> None:
    amp_model = kept("float8")
    plain = step(amp_model, x)

    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            made: Tensor = amp_model(x)
            return made

    assert equal(step(amp_model, x, call)[1], plain[1])


def test_backward_twice_and_second_derivatives(x: Tensor) -> None:
    torch.manual_seed(0)
    model = Layers(1).eval()
    parameters = list(model.parameters())
    found = []
    for one in [converted(model, x, keep).train() for keep in ("recompute", "as computed")]:
        torch.manual_seed(3)
        loss = one(x)
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        again = torch.autograd.grad(loss, parameters, create_graph=True)
        assert equal(list(first), list(again))
        second = torch.autograd.grad(sum(g.square().sum() for g in again), parameters, allow_unused=True)
        found.append([g for g in second if g is not None])
    assert equal(*found)


def test_a_weight_that_was_written_into_is_told(model: Layers, kept: Kept, x: Tensor) -> None:
    amp_model = kept("recompute")
    loss = amp_model(x)
    with torch.no_grad():
        model.layers[0].first.weight.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("keep", ["recompute", "float8"])
def test_nothing_stays_when_the_graph_goes(kept: Kept, x: Tensor, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amp_model, alive = kept(keep), weakref.WeakSet[Any]()
    init = saved.KeptValue.__init__

    def counted(self: Any, *args: Any) -> None:
        init(self, *args)
        alive.add(self)

    monkeypatch.setattr(saved.KeptValue, "__init__", counted)
    gc.collect()
    gc.disable()  # nothing waits for a search for cycles
    try:
        loss = amp_model(x)
        assert alive
        loss.backward()
        del loss
        assert not alive
    finally:
        gc.enable()


def test_without_gradients_nothing_is_kept(kept: Kept, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    amp_model = kept("recompute")
    monkeypatch.setattr(saved, "KeptValue", None)
    monkeypatch.setattr(saved, "Recomputed", None)
    with torch.no_grad():
        amp_model(x)
    torch.func.functional_call(amp_model.eval(), {}, (x,)).backward()  # nothing is prepared in eval
    amp_model.train()


def test_transforms() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).train()
    x = torch.randn(128, 64)
    found = []
    for keep in ("as computed", "recompute"):
        amp_model = converted(layer, x, keep)
        values = {name: p.detach() for name, p in amp_model.named_parameters()}
        found.append(
            torch.func.grad(lambda values, amp=amp_model: torch.func.functional_call(amp, values, (x,)).sum())(values)
        )
    assert equal(list(found[0].values()), list(found[1].values()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_the_same(kept: Kept, x: Tensor, copied: Callable[[AmpModule], AmpModule]) -> None:
    amp_model = kept("recompute")
    before, after = step(amp_model, x), step(copied(amp_model), x)
    assert equal(before[1], after[1])
    assert before[2] == after[2]


def test_a_frozen_part_saves_nothing(x: Tensor) -> None:
    torch.manual_seed(0)
    frozen = Layers().train()
    for p in frozen.layers[0].parameters():
        p.requires_grad_(False)
    before, after = step(converted(frozen, x), x), step(converted(frozen, x, "recompute"), x)
    assert equal(before[1], after[1])
    assert after[2].activations < before[2].activations


def test_a_parametrized_weight_keeps_the_same_bytes(x: Tensor) -> None:
    torch.manual_seed(0)
    wrapped = Layers(1).train()
    nn.utils.parametrizations.weight_norm(wrapped.layers[0].up)
    before, after = step(converted(wrapped, x), x), step(converted(wrapped, x, "recompute"), x)
    assert equal(before[1], after[1])
    assert after[2].activations < 0.6 * before[2].activations


def test_a_compiler_is_told_that_it_chooses(kept: Kept, x: Tensor) -> None:
    with pytest.warns(UnmatchedRuleWarning, match="torch.compile chooses itself what is kept"):
        torch.compile(kept("recompute"), backend="eager")(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(kept("as computed"), backend="eager")(x)


def test_an_enabled_model_is_told_that_rules_have_no_effect(x: Tensor) -> None:
    lists = autocastfx.OpList.of({"extends": "bfloat16", "saved": [{"keep": "recompute"}]})
    with pytest.warns(UnmatchedRuleWarning, match="the rules under 'saved' of the op list OpList have no effect"):
        autocastfx.enable(enabled := Layers(1).train(), dtype="bfloat16", op_list=lists, inner="aot_eager")
    enabled(x).backward()
    backend = autocastfx.backend_of(enabled)
    assert backend is not None
    assert all(graph.plan.saved == () for graph in backend.graphs if graph.plan is not None)


class Conjugated(nn.Module):
    """Saves views with the conjugate and the negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(self.first(x).float()).view(128, 32, 2)
        y: Tensor = (torch.view_as_complex(h).conj().imag * self.second(x).float()).mean()
        return y


class Statistics(nn.Module):
    """Reads the running statistics that its batch norm then writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        c = functional.gelu(h - self.norm.running_mean)
        y: Tensor = (self.second(c) + self.norm(h)).square().mean()
        return y


@pytest.mark.parametrize("kind", [Conjugated, Statistics])
def test_what_a_view_or_a_write_hides(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    original, batch = kind().train(), torch.randn(128, 64) + 3
    state = copy.deepcopy(original.state_dict())
    found = []
    for keep in ("as computed", "recompute", "float8"):
        original.load_state_dict(state)
        found.append(step(converted(original, batch, keep), batch))
    assert equal(found[0][1], found[1][1])
    assert distance(found[2][1], found[0][1]) < 2 * EPS8


def test_an_infinite_number_in_float8_is_seen() -> None:
    value = torch.tensor([[1.0, -torch.inf], [1.0, 2.0]])
    form = saved.FORMS[Keep.FLOAT8]
    restored = form.unpack(value.dtype, form.pack(value))
    assert restored[0].isnan().any()
    assert restored[1].isfinite().all()


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.5)


def by_a_fused_step(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), 0.3, fused=True).step()


@pytest.mark.parametrize("write", [by_data, by_a_fused_step])
def test_a_write_that_no_version_counter_tells_changes_nothing_that_is_recomputed(
    x: Tensor, write: Callable[[nn.Module], None]
) -> None:
    found = []
    for keep in ("as computed", "recompute"):
        torch.manual_seed(2)
        model = Layers(1).train()
        loss = converted(model, x, keep)(x)
        write(model)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert equal(list(found[0]), list(found[1]))


def test_where_hooks_are_not_allowed(kept: Kept, x: Tensor) -> None:
    amp_model = kept("recompute")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        loss = amp_model(x)
    loss.backward()


@pytest.mark.parametrize("keep", [Keep.BFLOAT16, Keep.FLOAT8])
def test_a_form_loses_no_more_than_its_rounding_and_less_in_a_row_with_an_offset(keep: Keep) -> None:
    form, step = saved.FORMS[keep], EPS8 if keep is Keep.FLOAT8 else 2**-8
    rows = torch.randn(8, 64) / 4 + torch.tensor([0.0, 1.0, -1.0, 2.0, -3.0, 50.0, -100.0, 1e4])[:, None]
    far = (form.unpack(rows.dtype, form.pack(rows)) - rows).abs()
    assert (far <= step * rows.abs().maximum(rows.abs().amax(1, keepdim=True) * 2**-8)).all()
    assert (far[5:] <= 2 * step).all()
    for small in (1e-30, 1e-36, 1e-38):
        value = torch.rand(4, 64) * small
        assert (form.unpack(value.dtype, form.pack(value)) - value).norm() <= step * value.norm()
    assert form.unpack(torch.float32, form.pack(torch.zeros(4, 8))).eq(0).all()
    assert form.unpack(torch.float32, form.pack(torch.zeros(0))).shape == (0,)


def test_an_infinite_number_in_bfloat16_leaves_its_row() -> None:
    value = torch.tensor([[1.0, -torch.inf], [torch.inf, 2.0], [torch.inf, torch.inf], [3e38, -3e38]])
    restored = saved.FORMS[Keep.BFLOAT16].unpack(value.dtype, saved.FORMS[Keep.BFLOAT16].pack(value))
    torch.testing.assert_close(restored, value, rtol=2**-8, atol=0)


def test_threads_draw_their_own_masks(kept: Kept, x: Tensor) -> None:
    state = torch.get_rng_state()
    amp_model = kept("recompute")
    loss = amp_model(x)
    after = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after)  # backward draws nothing, so that no other thread sees it
    torch.set_rng_state(state)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (5, 3), (2, 7, 9)])
def test_a_mask_is_kept_in_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mask = (torch.rand(shape) < 0.5).to(dtype)
    mask = mask if dtype == torch.bool else mask / 0.3
    for x in (mask, mask.transpose(0, -1), torch.zeros_like(mask)):
        if saved._Bits.fits(x):
            bits = saved._Bits(x)
            assert torch.equal(bits.restore(), x)
            assert bits.restore().stride() == x.stride()
    assert saved._Bits.fits(mask)
    assert not saved._Bits.fits(torch.tensor([1.0, 2.0, 0.0]))
    assert not saved._Bits.fits(torch.randn(4, 4).t()[1:])


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_a_wrong_row_scale_is_seen(model: Layers, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    form = saved.FORMS[Keep.FLOAT8]
    wrong = saved.Form(lambda v: (form.pack(v)[0], form.pack(v)[1].roll(1, 0), form.pack(v)[2]), form.unpack)
    monkeypatch.setitem(saved.FORMS, Keep.FLOAT8, wrong)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        test_fewer_bits_change_gradients_alone(functools.partial(converted, model, x), x, "float8")


def test_another_dropout_mask_is_seen(model: Layers, kept: Kept, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = saved._Bits.restore
    monkeypatch.setattr(saved._Bits, "restore", lambda self: restore(self).roll(1, 0))
    with pytest.raises(AssertionError):
        test_what_is_recomputed_is_the_same_to_the_bit(model, kept, x, "cast")


def test_a_value_of_another_row_is_seen(model: Layers, kept: Kept, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = saved.Recomputed.restore
    monkeypatch.setattr(saved.Recomputed, "restore", lambda self: restore(self).roll(1, 0))
    with pytest.raises(AssertionError):
        test_what_is_recomputed_is_the_same_to_the_bit(model, kept, x, "cast")
