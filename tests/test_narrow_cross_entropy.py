"""A cross entropy of 16-bit scores that keeps 16 bits for backward: the float32 loss, and its gradients but rounded."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.narrow_cross_entropy import narrow_cross_entropy
from tests.helpers import Function, listing, relative_error, rewritten, text

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = {"rows": (6, 8), "image": (2, 8, 3, 4)}
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
    return made.to(dtype).requires_grad_(), torch.randint(0, 8, shape[:1] + shape[2:], generator=generator)


def of_float32(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    named = {**options, "reduction": REDUCTIONS[options.get("reduction", 1)]}
    return functional.cross_entropy(x.float(), target, **named)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_loss_is_float32s_to_the_bit_and_the_gradient_rounded(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    x, target = scores(shape, dtype)
    found, wanted = narrow_cross_entropy(x, target, **options), of_float32(x, target, **options)
    assert found.dtype == torch.float32
    assert found.equal(wanted)
    out = torch.rand_like(found)
    (of_found,), (of_wanted,) = torch.autograd.grad(found, x, out), torch.autograd.grad(wanted, x, out)
    assert of_found.dtype == dtype
    assert relative_error(of_found, of_wanted) <= 2 * torch.finfo(dtype).eps  # of the logarithms, and of their weight


def test_a_mean_over_many_targets_is_divided_in_float32() -> None:
    """Their number has no 16 bits: in bfloat16 1001 would be 1000, in float16 70,001 would be infinite."""
    for dtype, rows in ((torch.bfloat16, 1001), (torch.float16, 70_001)):
        x, target = scores((rows, 8), dtype)
        (found,) = torch.autograd.grad(narrow_cross_entropy(x, target), x, torch.tensor(1024.0))
        (wanted,) = torch.autograd.grad(of_float32(x, target), x, torch.tensor(1024.0))
        assert relative_error(found, wanted) <= 2 * torch.finfo(dtype).eps


def test_it_cannot_be_differentiated_twice_and_says_so() -> None:
    x, target = scores((6, 8), torch.bfloat16)
    with pytest.raises(autocastfx.UnsupportedError, match=r"differentiated twice: convert the model with fold='exact'"):
        torch.autograd.grad(narrow_cross_entropy(x, target), x, create_graph=True)


def test_it_keeps_two_bytes_for_each_score() -> None:
    x, target = scores((64, 8), torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        narrow_cross_entropy(x, target)
    assert sorted(t.untyped_storage().nbytes() for t in kept) == [4, 8 * 64, 2 * 64 * 8]


def test_it_computes_under_fake_tensors_a_transform_and_a_compiler() -> None:
    x, target = scores((6, 8), torch.bfloat16)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert (
            narrow_cross_entropy(torch.empty(6, 8, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int64)).shape == ()
        )
    each = torch.func.grad(lambda scores: narrow_cross_entropy(scores, target))(x.detach())
    assert relative_error(each, torch.autograd.grad(of_float32(x, target), x)[0]) <= torch.finfo(torch.bfloat16).eps
    compiled = torch.compile(lambda x, t: narrow_cross_entropy(x, t), backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x, target), x)
    (wanted,) = torch.autograd.grad(narrow_cross_entropy(x, target), x)
    assert found.equal(wanted)


class Scores(nn.Module):
    """Scores of places on a line: three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv1d(4, 8, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), target)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), target)


def test_scores_of_other_sizes_are_left_to_torch() -> None:
    model, x = Scores(), torch.randn(2, 4, 3)
    amp_model = autocastfx.convert(
        model, (x, torch.zeros(2, 3, dtype=torch.int64)), dtype=torch.bfloat16, fold="kernel"
    )
    assert "nll_loss_nd" in listing(amp_model.graph)


def test_a_model_converted_with_fold_kernel_has_it() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x @ w, target)

    inputs = torch.randn(6, 4), torch.randn(4, 8), torch.arange(6)
    assert rewritten(loss, *inputs, dtype=torch.bfloat16, fold="kernel") == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          cross_entropy_loss: f32 = cross_entropy_loss(matmul, args_2)
          return cross_entropy_loss
    """)
    amp_model = autocastfx.convert(Function(loss), inputs, dtype=torch.bfloat16, fold="kernel")
    assert amp_model.plan["cross_entropy_loss"].op == "cross_entropy_loss"
    assert narrow_cross_entropy in {node.target for node in amp_model.graph.nodes}


def test_a_converted_model_trains_copies_and_pickles_as_with_its_parts() -> None:
    torch.manual_seed(0)
    model, x, target = Classifier(), torch.randn(6, 4), torch.arange(6)
    narrow, parts = (autocastfx.convert(model, (x, target), dtype=torch.bfloat16, fold=f) for f in ("kernel", "none"))
    held = io.BytesIO()
    torch.save(narrow, held)
    held.seek(0)
    for amp_model in (narrow, copy.deepcopy(narrow), torch.load(held, weights_only=False)):
        assert amp_model(x, target).equal(parts(x, target))
        found = torch.autograd.grad(amp_model(x, target), list(amp_model.parameters()))
        wanted = torch.autograd.grad(parts(x, target), list(parts.parameters()))
        for gradient, reference in zip(found, wanted, strict=True):
            assert gradient.dtype == torch.float32
            assert relative_error(gradient, reference) <= 4 * torch.finfo(torch.bfloat16).eps
