"""Which nodes fold at which level, and what a converted model is like then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.plan.plan import Precision
from tests.decided import rewritten
from tests.helpers import Function, relative_error, text

X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Normed(nn.Module):
    """A norm between products, its result joined again: the block of a transformer with norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)
        self.a, self.b, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        return self.b(self.after(x + self.a(x)))


class Mixed(nn.Module):
    """Layers weighed by a softmax of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x) @ torch.diag(self.weights.softmax(0)) @ x


def placed(model: nn.Module, *inputs: Tensor, **options: object) -> dict[str, Precision]:
    amp_model = autocastfx.convert(model.eval(), inputs, **{"dtype": torch.bfloat16, **options})  # pyright: ignore
    return {n.name: n.placement.run for n in amp_model.plan.nodes}


class Holds(nn.Module):
    """A norm between products, its parameters float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x @ x.mT, (8,), self.w, self.b) @ x


def test_a_norm_folds_and_reads_its_parameters_in_float32() -> None:
    shown = rewritten(Holds(), X, dtype=torch.bfloat16, fold="kernel")
    assert "layer_norm: bf16 = layer_norm(matmul, w, b)" in shown
    assert "layer_norm: f32 = layer_norm(matmul_float32, w, b)" in rewritten(Holds(), X, dtype=torch.bfloat16)


@pytest.mark.parametrize("weights", ["cast", "cached", "low"])
def test_the_parameters_of_a_norm_that_folds_have_no_16_bit_copy(weights: str) -> None:
    model = Holds()
    amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16, fold="kernel", weights=weights)
    assert amp_model.plan["layer_norm"].dtype == "bfloat16"
    assert [t.dtype for t in amp_model.parameters()] == [torch.float32] * 2
    assert not amp_model.plan.copies
    assert {c.value for c in amp_model.plan.casts}.isdisjoint({"w", "b"})
    with torch.no_grad():
        assert relative_error(amp_model(X), model(X)) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("how", ["by fold", "by list"])
def test_gradients_of_a_norms_parameters_are_added_up_in_float32(how: str) -> None:
    """Over 4096 rows a sum in 16 bits is off by far more than a rounding. All else here is exact in 16 bits."""
    options = {"fold": "kernel"} if how == "by fold" else {"op_list": autocastfx.OpList.of({"allow": ["layer_norm"]})}
    torch.manual_seed(0)
    x, head = torch.randn(1024, 8, 8).bfloat16().float(), torch.eye(8).expand(1024, 8, 8)
    model = Function(lambda x, head: model.norm(x @ head) @ head)
    model.norm = nn.LayerNorm(8)
    amp_model = autocastfx.convert(model, (x, head), dtype=torch.bfloat16, **options)  # pyright: ignore
    assert amp_model.plan["layer_norm"].dtype == "bfloat16"
    given = (1 + torch.randn(x.shape)).bfloat16().float()
    wanted = torch.autograd.grad(model(x, head), list(model.parameters()), given)
    found = torch.autograd.grad(amp_model(x, head), list(model.parameters()), given)
    for gradient, reference in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, reference) <= 16 * torch.finfo(torch.float32).eps


def test_a_norm_of_float32_values_runs_in_float32_and_draws_nothing_after_it() -> None:
    """Its result may be rounded, so what it is added to need not widen."""
    model, ids = Normed(), torch.arange(6).reshape(2, 3)
    found = placed(model, ids, fold="kernel")
    assert found["layer_norm"] is Precision.FLOAT32
    assert found["add"] is Precision.LOW
    assert found["layer_norm_1"] is Precision.LOW
    exact = placed(model, ids, fold="exact")
    assert {exact[n] for n in ("layer_norm", "add", "layer_norm_1")} == {Precision.FLOAT32}


def test_what_reads_only_what_the_model_holds_does_not_fold() -> None:
    assert placed(Mixed(), X, fold="kernel")["softmax"] is Precision.FLOAT32


def test_what_is_float32_for_a_reason_of_its_own_does_not_fold() -> None:
    def sharp(x: Tensor) -> Tensor:
        return functional.softmax(x @ x, -1, dtype=torch.float32) @ x

    assert placed(Function(sharp), X, fold="kernel")["softmax"] is Precision.FLOAT32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_under_an_additive_mask_fold_with_their_softmax(dtype: torch.dtype) -> None:
    """The mask's float32 minimum is saturated to half the range, once; a row that is masked whole gives no NaN."""

    def attend(x: Tensor, seen: Tensor) -> Tensor:
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        return functional.softmax(x @ x + mask, -1) @ x

    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen[0] = False
    amp_model = autocastfx.convert(Function(attend), (X, seen), dtype=dtype, fold="kernel")
    runs = {n.op: n.placement.run for n in amp_model.plan.nodes}
    assert runs["add"] is Precision.LOW
    assert runs["softmax"] is Precision.LOW
    assert [c.saturates for c in amp_model.plan.casts if c.value == "where"] == [True]
    result = amp_model(X, seen)
    # Scores below 4 are lost beside a masked one: the row that is masked whole is a mean, as in float32.
    assert relative_error(result, attend(X, seen)) <= 4 * torch.finfo(dtype).eps


def test_an_op_of_one_number_does_not_fold() -> None:
    """There is next to nothing to save."""

    def scaled(v: Tensor, x: Tensor) -> Tensor:
        return functional.softplus(v @ v).reshape(1, 1) @ x[:1]

    assert placed(Function(scaled), X[0], X)["softplus"] is Precision.FLOAT32
    assert placed(Function(lambda v, x: functional.softplus(v @ x) @ x), X[0], X)["softplus"] is Precision.LOW


def test_a_masked_sum_that_something_else_reads_does_not_fold() -> None:
    def attend(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        scores = x @ x + torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        return functional.softmax(scores, -1) @ x, scores

    found = placed(Function(attend), X, X > 0, fold="kernel")
    assert found["add"] is Precision.FLOAT32
    assert found["softmax"] is Precision.FLOAT32


def test_gradients_stay_near_those_of_the_float32_model() -> None:
    torch.manual_seed(0)
    model, ids = Normed(), torch.arange(6).reshape(2, 3)
    amp_model = autocastfx.convert(model, (ids,), dtype=torch.bfloat16, fold="kernel")
    wanted = torch.autograd.grad(model(ids).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(amp_model(ids).square().sum(), list(amp_model.parameters()))
    for gradient, reference in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, reference) <= 8 * torch.finfo(torch.bfloat16).eps  # as many roundings in a row


def test_the_levels_golden() -> None:
    def between(x: Tensor) -> Tensor:
        return functional.softmax(x @ x, -1) @ x

    assert rewritten(between, X, dtype=torch.bfloat16, fold="kernel") == text("""
        + args_0_bfloat16: bf16 = to(args_0)
          matmul: bf16 = matmul(args_0_bfloat16)
          softmax: bf16 = softmax(matmul)
          matmul_1: bf16 = matmul(softmax, args_0_bfloat16)
        + matmul_1_float32: f32 = to(matmul_1)
          return matmul_1_float32
    """)
