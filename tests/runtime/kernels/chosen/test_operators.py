"""The operators give with Triton kernels what they give without, and take them for what kernels can compute alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autocastfx.runtime.operators import cross_entropy_loss as cross_entropy_module
from autocastfx.runtime.operators import norms as rms_norm_module
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from autocastfx.runtime.operators.norms import rms_norm
from tests.helpers import relative_error, saved_bytes
from tests.runtime.kernels.against_float64 import EPS, drawn

pytestmark = pytest.mark.usefixtures("interpreter", "chosen")
LOW = torch.float16  # the interpreter rounds it as CUDA does
EPS_LOW = torch.finfo(LOW).eps
REDUCTIONS = ("none", "mean", "sum")
TARGET = torch.tensor([3, 0, -100, 7, 39, 7])


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen for tensors on the CPU, and for short rows."""
    for module in (cross_entropy_module, rms_norm_module):
        monkeypatch.setattr(module, "is_chosen", lambda name, tensor: True)
    monkeypatch.setattr(cross_entropy_module, "_CLASSES", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of kernels."""
    from autocastfx.runtime.kernels import cross_entropy, rms_norm

    called: list[str] = []

    def watch(module: Any, name: str) -> None:
        own: Callable[..., Any] = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **named: (called.append(name), own(*given, **named))[1])

    for module, name in ((cross_entropy, "row_losses"), (cross_entropy, "differentiate")):
        watch(module, name)
    for module, name in ((rms_norm, "normalize"), (rms_norm, "differentiate")):
        watch(module, name)
    return called


def scores(rows: int = 6, classes: int = 40) -> Tensor:
    return drawn(rows, classes).to(LOW).requires_grad_()


def of_float32(x: Tensor, target: Tensor, reduction: int = 1, ignore_index: int = -100) -> Tensor:
    named: dict[str, Any] = {"reduction": REDUCTIONS[reduction], "ignore_index": ignore_index}
    return functional.cross_entropy(x.float(), target, **named)


def of_float64(x: Tensor, weight: Tensor | None, eps: float | None = 1e-6) -> Tensor:
    return functional.rms_norm(x.double(), x.shape[-1:], None if weight is None else weight.double(), eps)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    entered: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x, weight = scores(), torch.ones(40, requires_grad=True)
    cross_entropy_loss(x, TARGET).backward()
    rms_norm(x, [40], weight).sum().backward()
    assert calls == ["row_losses", "differentiate", "normalize", "differentiate"]
    assert [t is x or t.data_ptr() == x.data_ptr() for t in entered] == [True] * 5


# ---- cross entropy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reduction": 0}, {"reduction": 2}, {"ignore_index": 7}], ids=str)
@pytest.mark.parametrize("rounds", [False, True])
def test_the_loss_is_float32s(options: dict[str, int], rounds: bool, calls: list[str]) -> None:
    x, target = scores(), TARGET if "ignore_index" not in options else TARGET.clamp_min(0)
    found, wanted = cross_entropy_loss(x, target, **options, rounds=rounds), of_float32(x, target, **options)
    assert found.dtype == torch.float32
    assert relative_error(found.detach(), wanted.detach()) <= 8 * EPS
    out = 1024 * torch.rand_like(found)
    (of_found,), (of_wanted,) = torch.autograd.grad(found, x, out), torch.autograd.grad(wanted, x, out)
    assert calls == ["row_losses", "differentiate"]
    assert of_found.dtype == LOW
    assert relative_error(of_found, of_wanted) <= EPS_LOW
    with torch.no_grad():
        assert cross_entropy_loss(x, target, **options).equal(found)
    assert calls[2:] == ["row_losses"]


def test_backward_keeps_the_scores_and_a_number_a_row() -> None:
    x = scores()
    assert saved_bytes(lambda: cross_entropy_loss(x, TARGET)) == x.nbytes + TARGET.nbytes + 4 * 6 + 4


def test_where_every_target_is_ignored_the_loss_is_nan_and_its_gradient_zero() -> None:
    x, target = scores(), torch.full((6,), -100)
    found = cross_entropy_loss(x, target)
    assert found.isnan()
    assert not torch.autograd.grad(found, x)[0].count_nonzero()


@pytest.mark.parametrize("target", [40, -1])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_class_that_there_is_not_is_refused(target: int, reduction: int) -> None:
    with pytest.raises(RuntimeError, match="cross_entropy_loss: a target is no class"):
        cross_entropy_loss(scores(), TARGET.where(TARGET != 7, target), reduction=reduction)


def test_several_gradients_at_once_and_second_ones_are_torchs(calls: list[str]) -> None:
    x, several = scores(), torch.tensor([1.0, 2.0])
    losses = cross_entropy_loss(x, TARGET), of_float32(x, TARGET)
    found, wanted = (torch.autograd.grad(loss, x, several, is_grads_batched=True)[0] for loss in losses)
    assert relative_error(found, wanted) <= 2 * EPS_LOW
    found, wanted = (
        torch.autograd.grad(torch.autograd.grad(loss(x, TARGET), x, create_graph=True)[0].square().sum(), x)[0]
        for loss in (cross_entropy_loss, of_float32)
    )
    assert found.equal(wanted)
    assert found.count_nonzero()
    assert calls == ["row_losses"] * 2


def test_kernels_take_rows_of_eager_scores_alone(calls: list[str]) -> None:
    x = scores()
    cross_entropy_loss(x, TARGET, torch.rand(40))  # classes have weights
    cross_entropy_loss(x, TARGET, recomputes=False)  # something writes over the scores later
    cross_entropy_loss(x.double(), TARGET)
    cross_entropy_loss(x[0], TARGET[0])
    cross_entropy_loss(x.reshape(1, 40, 2, 3), TARGET.reshape(1, 2, 3))
    torch.func.grad(lambda x: cross_entropy_loss(x, TARGET))(x.detach())
    with pytest.raises(ValueError, match=r"batch_size \(6\) to match target batch_size \(5\)"):
        cross_entropy_loss(x, TARGET[:5])
    assert not calls


def test_short_rows_are_computed_as_torch_does(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setattr(cross_entropy_module, "_CLASSES", 41)
    cross_entropy_loss(scores(), TARGET).backward()
    assert not calls


# ---- norm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
def test_the_norm_is_computed_in_float32(weighted: bool, calls: list[str]) -> None:
    x = drawn(2, 3, 64).to(LOW).requires_grad_()
    given = (x, drawn(64).requires_grad_()) if weighted else (x,)
    weight = given[1] if weighted else None
    found, wanted = rms_norm(x, [64], weight, 1e-6), of_float64(x, weight)
    assert found.dtype == LOW
    assert relative_error(found.detach(), wanted.detach()) <= EPS_LOW
    out = drawn(6, 64).view(2, 3, 64).to(LOW)
    of_found = torch.autograd.grad(found, given, out)
    assert calls == ["normalize", "differentiate"]
    for mine, exact in zip(of_found, torch.autograd.grad(wanted, given, out.double()), strict=True):
        assert relative_error(mine, exact) <= (EPS_LOW if mine.dtype == LOW else 8 * EPS)
    with torch.no_grad():
        assert rms_norm(x, [64], weight, 1e-6).equal(found)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    x, weight = drawn(4, 64).to(LOW), drawn(64)
    for leaf, other in ((x.clone().requires_grad_(), weight), (weight.clone().requires_grad_(), x)):
        given = (leaf, other) if leaf.ndim == 2 else (other, leaf)
        (found,) = torch.autograd.grad(rms_norm(given[0], [64], given[1], 1e-6).float().sum(), leaf)
        (exact,) = torch.autograd.grad(of_float64(*given).sum(), leaf)
        assert relative_error(found, exact) <= EPS_LOW


def test_backward_of_the_norm_keeps_the_input_the_weight_and_a_number_a_row() -> None:
    x, weight = drawn(4, 64).to(LOW).requires_grad_(), drawn(64).requires_grad_()
    assert saved_bytes(lambda: rms_norm(x, [64], weight, 1e-6)) == x.nbytes + weight.nbytes + 4 * 4


def test_the_norm_can_be_differentiated_twice_and_for_several_gradients(calls: list[str]) -> None:
    x, weight = drawn(3, 8).requires_grad_(), drawn(8).requires_grad_()
    norms: tuple[Callable[[], Tensor], ...] = (lambda: rms_norm(x, [8], weight, 1e-6), lambda: of_float64(x, weight))
    squares = (torch.autograd.grad(norm().sum(), (x, weight), create_graph=True) for norm in norms)
    found, exact = (torch.autograd.grad(sum(s.double().square().sum() for s in both), (x, weight)) for both in squares)
    for mine, wanted in zip(found, exact, strict=True):
        assert relative_error(mine, wanted) <= 64 * EPS
    out = drawn(2, 3, 8)
    several = (torch.autograd.grad(norm(), x, out.to(norm().dtype), is_grads_batched=True)[0] for norm in norms)
    assert relative_error(*several) <= 8 * EPS
    assert "differentiate" not in calls


def test_an_epsilon_that_is_not_given_is_float32s() -> None:
    x = (1e-4 * drawn(4, 64)).to(LOW)
    assert relative_error(rms_norm(x, [64]), of_float64(x, None, EPS)) <= EPS_LOW


def test_kernels_take_one_dimension_of_eager_floats_alone(calls: list[str]) -> None:
    x = drawn(4, 6, 64)
    rms_norm(x, [6, 64])
    rms_norm(x.double(), [64])
    rms_norm(drawn(1, 8193), [8193])
    rms_norm(x, [64], drawn(64).double())
    torch.func.grad(lambda x: rms_norm(x, [64]).sum())(x)
    assert not calls
