"""Gradients in both graphs are those of real training steps, and finding them changes nothing and keeps little."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autocastfx import AmpModule, Comparison, OpList, compare, convert, watch
from autocastfx.errors import CalibrationError
from autocastfx.numerics import paired_run
from autocastfx.numerics.paired_run import Gradients, run_backwards, run_side_by_side
from tests.helpers import Function, relative_error

EPS = torch.finfo(torch.float16).eps


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Tied(nn.Module):
    """Tied weights, a residual, a write into a slice, several outputs and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.table(ids)
        x = x + F.gelu(self.layer(x))
        first, second = self.layer(x).split(4, -1)
        y = torch.cat([second, first], -1) * 1.0
        y[0] = y[1] * 2
        return {"logits": self.head(y), "pair": (y.amax(-1), ids)}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4))


def tied_loss(output: dict[str, Any]) -> Tensor:
    return F.cross_entropy(output["logits"].float().flatten(0, 1), torch.arange(12) % 10) + output["pair"][0].sum()


def square(output: Tensor) -> Tensor:
    return output.float().square().sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[Any], Tensor]]] = {
    "training": (network, torch.linspace(-2, 2, 128).reshape(16, 8), square),
    "tied": (Tied, torch.arange(12).reshape(3, 4) % 10, tied_loss),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_parameters_have_the_gradients_of_a_training_step(name: str, weights: str) -> None:
    make, x, loss = CASES[name]
    model = make()
    amp_model = convert(model, (x,), weights=weights, dtype="float16")
    state = torch.get_rng_state()
    found = compare(None, amp_model, x, gradients=True, loss=loss, scale=8.0)
    gradients: list[dict[str, Tensor]] = []
    for trained in (amp_model, model):
        torch.set_rng_state(state)
        model.zero_grad()
        (loss(trained(x)) * 8).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    low, full = gradients
    torch.set_rng_state(state)
    run = run_side_by_side(None, amp_model, (x,), {}, gradients=True)
    assert list(run.steps())
    seen: list[Gradients] = []
    run_backwards(run, loss, 8.0, seen.append)
    back = {found.name: found.low[0] for found in seen if found.is_leaf}
    assert set(back) & set(low)
    assert all(torch.equal(back[name], low[name]) for name in set(back) & set(low)), "to the bit"
    assert [p.name for p in found.parameters] == list(low)
    for parameter in found.parameters:
        expected = relative_error(low[parameter.name], full[parameter.name])
        assert parameter.error == pytest.approx(expected, rel=1e-6)
        assert parameter.dtype == "float32"
    assert found.scale == 8


def test_values_have_gradients_too() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(16, 8)
    found = compare(None, convert(model, (x,), dtype="float16"), x, gradients=True, loss=square)
    assert [node.name for node in found.nodes if node.gradient is not None] == [node.name for node in found.nodes]
    kept: list[Tensor] = []
    h = x
    for layer in model:
        h = layer(h)
        h.retain_grad()
        kept.append(h)
    square(h).backward()
    own = found["linear"].gradient
    assert own is not None
    assert own.dtype == "float16"
    assert 0 < own.error < 16 * EPS
    assert found.worst_gradient is not None
    assert found.worst_gradient.gradient is not None
    assert found.worst_gradient.gradient.error == max(n.gradient.error for n in found.nodes if n.gradient)
    assert float(kept[0].grad.norm()) > 0  # type: ignore[union-attr]


def test_an_input_that_asks_for_a_gradient_gets_one_in_the_report_alone() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    found = compare(None, convert(Function(lambda x: torch.tanh(x @ x.t())), (x,), dtype="float16"), x, gradients=True)
    assert [p.name for p in found.parameters] == ["args_0"]
    assert 0 < found.parameters[0].error < 16 * EPS
    assert x.grad is None


def small(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w) @ w).float() * 1e-9


def test_small_gradients_vanish_without_a_loss_scale_and_large_ones_overflow_with_one() -> None:
    x, w = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
    amp_model = convert(Function(small), (x, w), dtype="float16")
    without, scaled, far = (
        compare(None, amp_model, x, w, gradients=True, scale=scale) for scale in (1.0, 2.0**24, 2.0**48)
    )
    gradient = without["matmul"].gradient
    assert gradient is not None
    assert (gradient.zeros, gradient.underflow, gradient.error) == (1.0, 1.0, 1.0)
    assert without["matmul"].underflow == 0
    gradient = scaled["matmul"].gradient
    assert gradient is not None
    assert (gradient.zeros, gradient.underflow) == (0.0, 0.0)
    assert gradient.error < 4 * EPS
    assert (without.is_finite, scaled.is_finite, far.is_finite) == (True, True, False)
    assert far.first_non_finite_gradient == far["matmul_1"], "the first backwards, which is the last forwards"
    assert far.worst_gradient == far["matmul_1"]
    assert far.first_non_finite is None
    assert far.parameters[-1].overflow == 1.0
    assert scaled.first_non_finite_gradient is None


def test_nothing_is_changed() -> None:
    model, x = network(), torch.randn(16, 8)
    amp_model = convert(model, (x,), dtype="float16")
    hooked: list[Any] = []
    for parameter in model.parameters():
        parameter.register_hook(hooked.append)
    next(model.parameters()).grad = before = torch.ones(16, 8)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = compare(None, amp_model, x, gradients=True)
    assert not hooked
    assert next(model.parameters()).grad is before
    assert torch.equal(before, torch.ones(16, 8))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert compare(None, amp_model, x, gradients=True) == found
    with torch.inference_mode():
        assert compare(model, amp_model, x, gradients=True) == found
    assert [n.error for n in compare(None, amp_model, x).nodes] == [n.error for n in found.nodes]


def deep(depth: int) -> tuple[AmpModule, Tensor]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)]
    x = torch.randn(4, 8)
    return convert(nn.Sequential(*layers), (x,), dtype="float16"), x


def test_memory_shrinks_on_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    amp_model, x = deep(20)
    saved: weakref.WeakSet[Tensor] = weakref.WeakSet()
    waiting: set[int] = set()
    pending: list[int] = []
    alive: list[int] = []
    see = paired_run._Waiting.see

    def counted(one: paired_run._Waiting, *given: Any) -> None:
        see(one, *given)
        (waiting.add if one.found else waiting.discard)(id(one))
        pending.append(len(waiting))
        alive.append(len(saved))

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        saved.add(kept)
        return kept

    monkeypatch.setattr(paired_run._Waiting, "see", counted)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        found = compare(None, amp_model, x, gradients=True)
    assert len(found.parameters) == 40
    assert len(pending) == 2 * (40 + 40)
    assert max(pending) <= 4, "a value's, a weight's and a bias's, and one on its way"
    assert alive[0] > 20 * 2 * 2
    assert alive[len(alive) // 2] < 0.6 * alive[0]
    assert alive[-1] <= 2, "of the first layer alone"
    assert not saved


def test_what_cannot_be_done_is_said() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    amp_model = convert(model, (x,), dtype="float16")
    with pytest.raises(ValueError, match=r"loss gave shape \(2, 8\): it must turn"):
        compare(None, amp_model, x, gradients=True, loss=lambda y: y)
    with pytest.raises(ValueError, match="loss gave float"):
        compare(None, amp_model, x, gradients=True, loss=lambda y: 1.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="loss and scale are for gradients"):
        compare(None, amp_model, x, scale=2.0)
    model.requires_grad_(False)
    state = torch.get_rng_state()
    with pytest.raises(CalibrationError, match=r"unfreeze a parameter, or call requires_grad_"):
        compare(None, convert(model, (x,), dtype="float16"), x, gradients=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exponential_that_overflows_backwards_alone_is_named() -> None:
    def narrow(x: Tensor) -> Tensor:
        return torch.sqrt(torch.exp(x) * 1e-8) * 1.0

    x = torch.full((4,), -1.0, requires_grad=True)
    listed = OpList.of({"allow": ["exp", "sqrt", "mul"]})
    found: Comparison = compare(
        None, convert(Function(narrow), (x,), op_list=["default", listed], dtype="float16"), x, gradients=True
    )
    assert found.first_non_finite is None
    assert found.first_non_finite_gradient is not None
    assert found.first_non_finite_gradient.name == "mul"


@pytest.mark.parametrize("saved", ["recompute", "low", "float8"])
def test_what_is_kept_rounded_for_backward_is_seen(saved: str) -> None:
    layers = (
        nn.Linear(16, 64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.Softmax(-1),
        nn.Dropout(0.3),
        nn.Linear(64, 8),
        nn.Tanh(),
    )
    model, x = nn.Sequential(*layers), torch.randn(64, 16)
    amp_model = convert(model, x, dtype=torch.bfloat16, saved=saved, check=False)
    plain = convert(model, x, dtype=torch.bfloat16, op_list="float32", check=False)

    def gradients(one: AmpModule) -> dict[str, Tensor]:
        torch.manual_seed(5)
        found = torch.autograd.grad(one(x).square().mean(), list(one.parameters()))
        return dict(zip(dict(one.named_parameters()), found, strict=True))

    trained, exact = gradients(amp_model), gradients(plain)
    torch.manual_seed(5)
    found = compare(None, amp_model, x, gradients=True, loss=lambda output: output.square().mean())
    assert found.skipped == 0
    assert len(found.parameters) == 6
    assert (max(one.error for one in found.parameters) > 0.01) == (saved == "float8")
    for one in found.parameters:
        assert one.error == pytest.approx(relative_error(trained[one.name], exact[one.name]), rel=1e-3)
    with watch(amp_model, every=1) as seen:
        assert all(torch.equal(g, trained[name]) for name, g in gradients(amp_model).items())
    assert {"linear", "gelu"} <= {row.name for row in seen.rows}
