"""A cross entropy whose 16-bit logits are widened by the op itself, not by a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autocastfx
from autocastfx.runtime.operators import cross_entropy_loss as module
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from tests.decided import rewritten
from tests.helpers import Function, text

TORCHS = torch.ops.aten.cross_entropy_loss.default

LOW = torch.bfloat16
LOGITS, CLASSES = torch.randn(6, 8), torch.arange(6)


def _loss(**options: Any) -> Any:
    def loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ w, target, **options)

    return loss


def test_sixteen_bit_logits_are_read_as_they_are() -> None:
    assert rewritten(_loss(), LOGITS, torch.randn(8, 8), CLASSES, dtype=LOW) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          cross_entropy_loss: f32 = cross_entropy_loss(matmul, args_2)
          return cross_entropy_loss
        """)
    amp_model = autocastfx.convert(Function(_loss()), (LOGITS, torch.randn(8, 8), CLASSES), dtype=LOW)
    assert losses(amp_model) == [cross_entropy_loss]


def losses(amp_model: autocastfx.AmpModule) -> list[Any]:
    return [node.target for node in amp_model.graph.nodes if node.target in (TORCHS, cross_entropy_loss)]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(F.cross_entropy, (LOGITS, CLASSES), id="float32 logits"),
        pytest.param(_loss(label_smoothing=0.1), (LOGITS, torch.randn(8, 8), CLASSES), id="smoothed labels"),
        pytest.param(_loss(), (LOGITS, torch.randn(8, 8), torch.rand(6, 8).softmax(1)), id="probabilities"),
    ],
)
def test_others_stay_torchs(function: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    amp_model = autocastfx.convert(Function(function), inputs, dtype=LOW)
    assert losses(amp_model) == [TORCHS]
    assert amp_model.plan["cross_entropy_loss"].dtype == "float32"


def test_an_allowed_one_stays_torchs() -> None:
    listed = autocastfx.load_op_list("bfloat16") | autocastfx.OpList.of({"allow": ["cross_entropy_loss"]})
    after = rewritten(_loss(), LOGITS, torch.randn(8, 8), CLASSES, dtype=LOW, op_list=listed)
    assert "cross_entropy_loss: bf16 = cross_entropy_loss(matmul, args_2)" in after
    inputs = LOGITS, torch.randn(8, 8), CLASSES
    assert losses(autocastfx.convert(Function(_loss()), inputs, dtype=LOW, op_list=listed)) == [TORCHS]


@pytest.mark.parametrize("writes", [False, True])
def test_logits_that_are_written_after_the_loss_are_not_computed_from_again(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CLASSES", "_PER_THREAD", "_PARTS"):  # in parts of one row
        monkeypatch.setattr(module, name, 1)

    def loss_and_logits(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x @ w
        loss = F.cross_entropy(logits, target)
        if writes:
            logits.relu_()
        return loss, logits

    x, w = LOGITS.clone().requires_grad_(), torch.randn(8, 8)
    amp_model = autocastfx.convert(Function(loss_and_logits), (x, w, CLASSES), dtype=LOW)
    (node,) = [node for node in amp_model.graph.nodes if node.target is cross_entropy_loss]
    assert node.kwargs.get("recomputes", True) is not writes
    low = LOGITS.to(LOW).requires_grad_()
    loss, expected = amp_model(x, w, CLASSES)[0], F.cross_entropy((low @ w.to(LOW)).float(), CLASSES)
    assert loss.equal(expected)
    (gradient,), (expected_gradient,) = torch.autograd.grad(loss, x), torch.autograd.grad(expected, low)
    assert gradient.equal(expected_gradient.float())


def test_the_plan_and_the_dump_know_it_by_its_own_name() -> None:
    amp_model = autocastfx.convert(Function(_loss()), (LOGITS, torch.randn(8, 8), CLASSES), dtype=LOW, check=False)
    planned = amp_model.plan["cross_entropy_loss"]
    assert (planned.op, planned.decision.category, planned.dtype) == ("cross_entropy_loss", "deny", "float32")
    lines = autocastfx.dump(amp_model).splitlines()
    assert any(line.split()[:1] == ["cross_entropy_loss"] for line in lines)


SHAPES = {"vector": (8,), "matrix": (6, 8), "line": (2, 8, 3), "image": (2, 8, 3, 4)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weight": torch.rand(8)},
    "summed": {"reduction": "sum"},
    "each, one class ignored": {"reduction": "none", "ignore_index": 3},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_numbers_and_gradients_are_those_of_float32_logits(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            logits = torch.einsum("ij,jn->in", self.scale, x.reshape(8, -1)).reshape(x.shape)
            return F.cross_entropy(logits, target, **options)

    model, x = Model(), torch.randn(shape)
    target = torch.randint(0, 8, shape[:1] + shape[2:] if len(shape) > 1 else ())
    amp_model = autocastfx.convert(model, (x, target), dtype=dtype)
    assert losses(amp_model) == [cross_entropy_loss]
    loss = amp_model(x, target)
    (gradient,) = torch.autograd.grad(loss.sum(), model.scale)

    low = model.scale.detach().to(dtype).requires_grad_()
    logits = torch.einsum("ij,jn->in", low, x.to(dtype).reshape(8, -1)).reshape(shape)
    expected = F.cross_entropy(logits.float(), target, **options)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), low)
    assert loss.equal(expected)
    assert gradient.equal(expected_gradient.float())


def test_converted_without_inputs_it_gives_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), target)

    model = Model()
    amp_model = autocastfx.convert(model, dtype=LOW)
    loss = amp_model(LOGITS, CLASSES)
    assert loss.equal(autocastfx.convert(model, (LOGITS, CLASSES), dtype=LOW)(LOGITS, CLASSES))
    assert losses(amp_model) == [cross_entropy_loss]
