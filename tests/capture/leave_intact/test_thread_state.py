"""Conversion leaves torch's thread state alone, and a caller's hooks on saved tensors do not disturb it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx import AmpModule, convert
from autocastfx.capture.leave_intact import own_thread_state
from autocastfx.errors import CaptureError
from tests.helpers import relative_error
from tests.thread_state import thread_state

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
OLD = torch.__version__.startswith("2.11")  # its export refuses every transform in forward


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8)), torch.randn(4, 8)


def gradients(amp_model: AmpModule, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [p.grad for p in amp_model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_call_inside_checkpoint(reentrant: bool) -> None:
    (model, x), (same, _) = made(), made()
    late, early = convert(model, dtype=LOW), convert(same, x, dtype=LOW)
    x.requires_grad_()
    torch.manual_seed(1)
    found = gradients(late, checkpoint(late, x, use_reentrant=reentrant).sum())
    torch.manual_seed(1)
    expected = gradients(early, early(x).sum())
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_hooks_see_the_tensors_of_the_call_alone() -> None:
    model, x = made()
    amp_model, seen = convert(model, dtype=LOW), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        seen.append(tensor.clone())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        amp_model(x)
        first = len(seen)
        amp_model(x)
    assert len(seen) == 2 * first
    assert all(type(one) is Tensor for one in seen)


class Velocity(nn.Module):
    """A derivative in forward mode, as mean flows take it."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        def both(x: Tensor, t: Tensor) -> Tensor:
            return self.f(torch.cat([x, t], -1))

        u, du = torch.func.jvp(both, (x, t), (v, torch.ones_like(t)))
        return ((u - (v - t * du).detach()) ** 2).mean()


class Slopes(nn.Module):
    """Derivatives of each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda p: self.f(p).squeeze(-1)))(x)


class Frozen(Velocity):
    """Without gradients of the tangent: torch.export puts the transform into a graph of its own."""

    def forward(self, x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            loss = super().forward(x, t, v)
        return loss * self.f(torch.cat([x, t], -1)).mean()


class Jacobian(Slopes):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacfwd(self.f))(x)


class Pullback(Slopes):
    """The function of ``vjp`` is called when the transform has ended."""

    def forward(self, x: Tensor) -> Tensor:
        y, pull = torch.func.vjp(self.f, x)
        return pull(y.tanh())[0] * y


class Failing(Velocity):
    def forward(self, x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: self.f(x), (x,), (v,))[1]


def case(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, same = kind(), kind()
    same.load_state_dict(model.state_dict())
    args = (torch.randn(4, 8), torch.rand(4, 1), torch.randn(4, 8))
    return model, same, args if issubclass(kind, Velocity) else (torch.randn(5, 9),)


def results(model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize("kind", [Velocity, Slopes, Frozen, Jacobian, Pullback])
def test_transforms_in_forward_are_right_and_leave_nothing_behind(kind: type[nn.Module], way: str) -> None:
    for op_list in ("float32", "default"):
        model, same, args = case(kind)
        expected, before = results(same, args), thread_state()
        if way == "convert" and (kind not in (Velocity, Frozen) or OLD):
            with pytest.raises(CaptureError, match=r"autocastfx\.enable"):
                convert(model, args, op_list=op_list, dtype=LOW)
            assert thread_state() == before
            continue
        made = convert(model, args, op_list=op_list, dtype=LOW) if way == "convert" else model
        if way == "enable":
            autocastfx.enable(model, op_list=op_list, dtype=LOW, uncaptured="error")
        found = results(made, args)
        after = thread_state()
        assert after == before
        assert len(found) == len(expected)
        if op_list == "float32":
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        else:
            errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
            assert 0 < max(errors) < 16 * torch.finfo(LOW).eps


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_a_transform_that_fails_leaves_nothing_behind(way: str) -> None:
    model, _, args = case(Failing)
    before = thread_state()
    if way == "enable":
        autocastfx.enable(model, dtype=LOW)
    with pytest.raises(CaptureError):
        convert(model, args, dtype=LOW) if way == "convert" else model(*args)
    assert thread_state() == before


def leave_open() -> None:
    """Do as the first half of a graph, and fail.

    Raises:
        ZeroDivisionError: always.
    """
    functorch: Any = torch._C._functorch
    autograd: Any = torch._C._autograd
    functorch._grad_increment_nesting()
    functorch._vmap_increment_nesting(2, "error")
    functorch.set_inplace_requires_grad_allowed(True)
    autograd._saved_tensors_hooks_disable("none here")
    torch._C._set_grad_enabled(True)
    torch._C._set_fwd_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_dtype("xpu", torch.bfloat16)
    torch.set_autocast_cache_enabled(False)
    raise ZeroDivisionError


def test_what_is_left_open_is_closed() -> None:
    def keep(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(keep, keep), torch.no_grad():
        before = thread_state()
        with pytest.raises(ZeroDivisionError), own_thread_state():
            leave_open()
        assert thread_state() == before


@pytest.mark.filterwarnings("ignore:hooks on every module:autocastfx.errors.StateWarning")  # it counts by module, too
@pytest.mark.parametrize("is_late", [False, True])
def test_a_counter_of_operations_counts_the_call_alone(is_late: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(4, 8, requires_grad=True)
    amp_model = autocastfx.convert(model, dtype="bfloat16") if is_late else None
    with FlopCounterMode(display=False) as counter:
        before = list(modules._global_forward_pre_hooks)
        (amp_model or autocastfx.convert(model, (x,), dtype="bfloat16"))(x)
        assert list(modules._global_forward_pre_hooks) == before
    assert counter.get_total_flops() == 2 * 4 * 8 * (8 + 4)
