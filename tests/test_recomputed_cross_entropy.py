"""A cross entropy that keeps its 16-bit scores alone for backward: the numbers of float32 scores, to the bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.recomputed_cross_entropy import recomputed_cross_entropy
from tests.helpers import Function, rewritten, text

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = {"vector": (8,), "matrix": (6, 8), "volume": (2, 8, 3), "image": (2, 8, 3, 4), "more": (2, 8, 3, 2, 2)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weight": torch.linspace(0.1, 1, 8)},
    "summed": {"reduction": 2},
    "each, one class ignored": {"reduction": 0, "ignore_index": 3},
}
REDUCTIONS = ("none", "mean", "sum")


def scores(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = 3 * torch.randn(shape, generator=generator)
    others = shape[:1] + shape[2:] if len(shape) > 1 else ()
    return made.to(dtype).requires_grad_(), torch.randint(0, 8, others, generator=generator)


def of_float32(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    named = {**options, "reduction": REDUCTIONS[options.get("reduction", 1)]}
    return functional.cross_entropy(x.float(), target, **named)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradient_are_those_of_float32_scores(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    x, target = scores(shape, dtype)
    found, wanted = recomputed_cross_entropy(x, target, **options), of_float32(x, target, **options)
    assert found.dtype == torch.float32
    assert found.equal(wanted)
    out = torch.rand_like(found)
    (of_found,), (of_wanted,) = torch.autograd.grad(found, x, out), torch.autograd.grad(wanted, x, out)
    assert of_found.dtype == dtype
    assert of_found.equal(of_wanted)


def test_it_can_be_differentiated_twice() -> None:
    x, target = scores((6, 8), torch.bfloat16)

    def twice(loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(gradient.float().square().sum(), x)[0]

    assert twice(recomputed_cross_entropy(x, target)).equal(twice(of_float32(x, target)))


def test_it_keeps_the_scores_and_the_target() -> None:
    x, target = scores((64, 8), torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        recomputed_cross_entropy(x, target)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), target.data_ptr()}


def test_it_computes_under_fake_tensors_vmap_and_a_compiler() -> None:
    x, target = scores((6, 8), torch.bfloat16)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert (
            recomputed_cross_entropy(torch.empty(6, 8, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int64)).shape
            == ()
        )
    each = torch.vmap(lambda row, index: recomputed_cross_entropy(row, index))(x.detach(), target)
    assert each.mean().allclose(of_float32(x, target))
    compiled = torch.compile(lambda x, t: recomputed_cross_entropy(x, t), backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x, target), x)
    (wanted,) = torch.autograd.grad(of_float32(x, target), x)
    assert found.equal(wanted)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), target)


def test_a_model_converted_with_fold_kernel_has_it() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x @ w, target)

    inputs = torch.randn(6, 4), torch.randn(4, 8), torch.arange(6)
    assert rewritten(loss, *inputs, dtype=torch.bfloat16, fold="kernel") == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          cross_entropy_loss: f32 = autocastfx::cross_entropy_loss(matmul, args_2)
          return cross_entropy_loss
    """)
    plan = autocastfx.convert(Function(loss), inputs, dtype=torch.bfloat16, fold="kernel").plan
    assert plan["cross_entropy_loss"].op == "cross_entropy_loss"


def test_a_converted_model_trains_copies_and_pickles_as_with_its_parts() -> None:
    torch.manual_seed(0)
    model, x, target = Classifier(), torch.randn(6, 4), torch.arange(6)
    lean, parts = (autocastfx.convert(model, (x, target), dtype=torch.bfloat16, fold=f) for f in ("kernel", "none"))
    held = io.BytesIO()
    torch.save(lean, held)
    held.seek(0)
    for amp_model in (lean, copy.deepcopy(lean), torch.load(held, weights_only=False)):
        assert amp_model(x, target).equal(parts(x, target))
        found = torch.autograd.grad(amp_model(x, target), list(amp_model.parameters()))
        wanted = torch.autograd.grad(parts(x, target), list(parts.parameters()))
        assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
