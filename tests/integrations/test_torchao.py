"""Float8 products are those of torchao's Float8Linear to the bit, and a model that holds such layers is refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList
from autocastfx.errors import UnsupportedError
from autocastfx.runtime.operators import float8

pytest.importorskip("torchao", reason="needs torchao: make integrations")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WORDS = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}
LOW = torch.bfloat16


def swapped(model: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    """A copy in 16 bits, whose linear layers torchao has swapped."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(WORDS[recipe]), emulate=emulate)
    return convert_to_float8_training(copy.deepcopy(model).to(LOW), config=config)


def run(model: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    result = model(x)
    result.backward(gradient)
    found = [result.detach(), x.grad, *(p.grad for p in model.parameters())]
    assert all(t is not None for t in found)
    return [t.to(LOW) for t in found if t is not None]


@pytest.mark.parametrize(("shape", "mode"), [((64,), "train"), ((2, 16), "eval")], ids=["matrix", "batch"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("emulate", [False, True], ids=["products", "emulated"])
@pytest.mark.parametrize("recipe", WORDS)
def test_output_and_gradients_are_those_of_torchao(
    recipe: str, emulate: bool, bias: bool, shape: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not emulate:  # what a GPU computes; on a CPU these products are as right, but slow
        monkeypatch.setattr(float8, "has_fast_products", lambda _: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, bias=bias))
    # Numbers of 16 bits, so that nothing but products rounds; rows and columns differ in magnitude.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(LOW))
    x = (torch.randn(*shape, 256) * torch.randn(256).exp()).to(LOW).float()
    gradient = (torch.randn(*shape, 128) * torch.randn(*shape, 1).exp()).to(LOW).float()
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"], "recipe": recipe, "emulate": emulate}]})
    amp_model = autocastfx.convert(getattr(model, mode)(), (x,), dtype=LOW, op_list=lists)
    theirs = swapped(model, recipe, emulate=emulate)
    expected = run(theirs, x.to(LOW), gradient.to(LOW))
    for found, wanted in zip(run(amp_model, x, gradient), expected, strict=True):
        assert torch.equal(found, wanted)
    plain = run(autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW), x, gradient)
    assert not torch.equal(plain[0], expected[0]), "float8 changes something"


def test_layers_that_torchao_swapped_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    said = "2 modules of Sequential are torchao's Float8Linear, the first being '0': convert the model before torchao"
    with pytest.raises(UnsupportedError, match=said):
        autocastfx.convert(swapped(model, "rowwise", emulate=True), (torch.randn(16, 64),), dtype=LOW)


def test_torchaos_optimizers_are_composed() -> None:
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
    x, y = torch.randn(32, 64), torch.randn(32, 16)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.float16)
    inner: Any = AdamW8bit(model.parameters(), lr=1e-2)
    optimizer = autocastfx.LossScalingOptimizer(inner)
    losses = []
    for _ in range(10):
        loss = (amp_model(x) - y).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
