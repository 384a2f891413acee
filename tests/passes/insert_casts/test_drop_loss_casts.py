"""A model's own cast to float32 before a cross entropy: gone where the loss is float32 in any case, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.errors import BannedOpError
from autocastfx.plan.plan import Recomposed
from tests.decided import decided, rewritten
from tests.helpers import Function, saved_bytes, text

LOW = torch.bfloat16
X, W, TARGET = torch.randn(2, 4, 8), torch.randn(8, 8), torch.randint(0, 8, (2, 4))
Loss = Callable[[Tensor, Tensor, Tensor], Any]


def plain(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((x @ w).float().view(-1, 8), target.view(-1))


def shifted(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """As language models predict: the next one."""
    scores = (x @ w).float()[..., :-1, :].contiguous()
    return functional.cross_entropy(scores.view(-1, 8), target[..., 1:].reshape(-1))


def twice(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((x @ w).float().view(-1, 8).to(torch.float32), target.view(-1))


def test_the_graph_before_and_after() -> None:
    assert rewritten(plain, X, W, TARGET, dtype=LOW, recompose=False) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          to: f32 = to(matmul)
          view: f32 = view(to)
          view_1: torch.int64 = view(args_2)
          cross_entropy_loss: f32 = cross_entropy_loss(view, view_1)
          return cross_entropy_loss
    """)
    assert rewritten(plain, X, W, TARGET, dtype=LOW) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          view: bf16 = view(matmul)
          view_1: torch.int64 = view(args_2)
          cross_entropy_loss: f32 = cross_entropy_loss(view, view_1)
          return cross_entropy_loss
    """)


@pytest.mark.parametrize("loss", [plain, shifted, twice])
@pytest.mark.parametrize("dtype", [torch.float16, LOW], ids=str)
def test_loss_and_gradients_are_the_same_to_the_bit(loss: Loss, dtype: torch.dtype) -> None:
    models = [autocastfx.convert(Function(loss), (X, W, TARGET), dtype=dtype, recompose=r) for r in (True, False)]
    found, wanted = (ran(model) for model in models)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    assert "to" not in [node.op for node in models[0].plan.nodes]
    assert "loss_cast" in {r.pattern for r in models[0].plan.recomposed}


def ran(model: nn.Module) -> list[Tensor]:
    inputs = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    loss = model(*inputs, TARGET)
    return [loss, *torch.autograd.grad(loss, inputs)]


def test_it_is_recorded_chosen_and_done_once() -> None:
    amp_model = autocastfx.convert(Function(plain), (X, W, TARGET), dtype=LOW, recompose=["loss_cast"], check=False)
    assert amp_model.plan.recomposed == (Recomposed("loss_cast", "cross_entropy_loss", ("to",)),)
    assert "recomposed: loss_cast (1)" in autocastfx.dump(amp_model)
    again = decided(plain, X, W, TARGET, dtype=LOW, recompose=["softmax"])
    assert "to" in [node.op for node in again.plan.nodes]


def test_with_fold_kernel_two_bytes_are_kept_for_each_score() -> None:
    w = nn.Parameter(torch.randn(8, 512))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy((x @ self.w).float(), target)

    x, target = torch.randn(512, 8), torch.randint(0, 512, (512,))  # as many as are worth rounding

    def kept(*, recompose: bool) -> int:
        amp_model = autocastfx.convert(Model(), (x, target), dtype=LOW, fold="kernel", recompose=recompose)
        return saved_bytes(lambda: amp_model(x, target))

    assert kept(recompose=False) - kept(recompose=True) == 2 * 512 * 512


def shown(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    scores = (x @ w).float()
    return functional.cross_entropy(scores.view(-1, 8), target.view(-1)), scores


def scaled(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(((x @ w).float() / 2).view(-1, 8), target.view(-1))


def smoothed(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((x @ w).float().view(-1, 8), target.view(-1), label_smoothing=0.1)


def written(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    scores = (x @ w).to(torch.float32, copy=True)
    scores.mul_(2)
    return functional.cross_entropy(scores.view(-1, 8), target.view(-1))


def written_first(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """What the cast read is written to later: without the cast the loss would read it then, too."""
    low = x @ w
    scores = low.to(torch.float32, copy=True)
    low.mul_(2)
    return functional.cross_entropy(scores.view(-1, 8), target.view(-1)) + low.sum()


def laid_out(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    scores = (x @ w).transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return functional.cross_entropy(scores.view(-1, 8), target.t().reshape(-1))


@pytest.mark.parametrize("loss", [shown, scaled, smoothed, written, written_first, laid_out])
def test_a_cast_stays_that_something_else_needs(loss: Loss) -> None:
    amp_model = decided(loss, X, W, TARGET, dtype=LOW)
    assert "to" in [node.op for node in amp_model.plan.nodes]
    assert amp_model.plan.recomposed == ()


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x.view(-1, 8)[torch.arange(8) % 3],
    "chunk": lambda x: x.view(-1, 8).chunk(1)[0],
    "gather": lambda x: x.view(-1, 8).gather(0, torch.zeros(8, 8, dtype=torch.long)),
    "repeat": lambda x: x[:1].repeat(2, 1, 1).view(-1, 8),
    "expand": lambda x: x[:1].expand(2, -1, -1).reshape(-1, 8),
    "masked_fill": lambda x: x.view(-1, 8).masked_fill(torch.eye(8, dtype=torch.bool), -1000.3),
    "clamp": lambda x: x.view(-1, 8).clamp(-0.3, 0.3),
    "pad": lambda x: functional.pad(x, (0, 0, 0, 0), value=0.3).view(-1, 8),
    "dropout": lambda x: functional.dropout(x, 0.3).view(-1, 8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cast_stays_that_more_than_views_read(name: str) -> None:
    """What computes, or adds gradients up, is float32 as the model asks."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(OTHERS[name]((x @ w).float()), target.view(-1))

    amp_model = decided(loss, X, W, TARGET, dtype=LOW)
    assert "to" in [node.op for node in amp_model.plan.nodes]
    assert amp_model.plan.recomposed == ()


def test_it_stays_where_the_list_lets_the_loss_run_low() -> None:
    """There the cast is what keeps it float32."""
    listed = autocastfx.load_op_list("bfloat16") | autocastfx.OpList.of({"infer": ["cross_entropy_loss"]})
    amp_model = decided(plain, X, W, TARGET, dtype=LOW, op_list=listed)
    assert amp_model.plan["cross_entropy_loss"].dtype == "float32"
    assert amp_model.plan.recomposed == ()


def test_it_stays_where_the_list_keeps_casts_and_is_refused_where_it_bans_them() -> None:
    kept, banned = (
        autocastfx.load_op_list("bfloat16") | autocastfx.OpList.of({category: ["to"]}) for category in ("keep", "ban")
    )
    assert decided(plain, X, W, TARGET, dtype=LOW, op_list=kept).plan.recomposed == ()
    with pytest.raises(BannedOpError):
        autocastfx.convert(Function(plain), (X, W, TARGET), dtype=LOW, op_list=banned)
