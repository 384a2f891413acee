"""Float8 numbers and products are those of torchao to the bit, and a model whose layers it has swapped is refused."""

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
from autocastfx.policy.float8 import E4M3, Layout
from autocastfx.runtime.operators import float8
from autocastfx.runtime.operators.float8 import quantize

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


def numbers(dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices of [K, 64], with all magnitudes that a scale of torchao's is right for, and special numbers."""
    random = torch.Generator().manual_seed(0)
    powers = torch.arange(-117, 127).repeat_interleave(16)[:, None]
    x = torch.ldexp(torch.randn(len(powers), 64, generator=random).clamp(-1.9, 1.9), powers - 1)
    x[:, ::32] = torch.ldexp(torch.rand(len(powers), 2, generator=random) + 1, powers - 1)
    near = (448 + torch.arange(64)).repeat(4, 1) * torch.tensor([[1.0], [-1.0], [0.5], [2.0**100]])
    special = {"zeros": 0.0, "minus zero": -0.0, "inf": torch.inf, "minus inf": -torch.inf, "nan": torch.nan}
    made = {
        name: torch.randn(4, 64, generator=random).index_fill(1, torch.tensor([3]), n) for name, n in special.items()
    }
    subnormal = torch.ldexp(torch.randn(8, 64, generator=random), torch.arange(-149, -117, 4)[:, None])
    every = {"all": x, "clamped": near, "only zeros": torch.zeros(2, 64), "subnormal": subnormal, **made}
    return {name: matrix.to(dtype) for name, matrix in every.items()}


@pytest.mark.parametrize("layout", [Layout.BLOCKS, Layout.COLUMN_BLOCKS])
@pytest.mark.parametrize("dtype", [LOW, torch.float32])
@pytest.mark.parametrize("name", numbers(LOW))
def test_blocks_are_those_of_torchaos_mx_tensor(name: str, dtype: torch.dtype, layout: Layout) -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    x = numbers(dtype)[name]
    theirs = MXTensor.to_mx(x.float(), E4M3, 32, ScaleCalculationMode.FLOOR)
    found = float8.Quantized(*quantize(x.t() if layout.is_turned else x, layout, E4M3, True), layout)
    of_block = 1 / found.scale.float()  # the package keeps what numbers were multiplied by
    restored, expected = float8._restored(found), theirs.dequantize(torch.float32)
    is_nan = of_block.isnan().repeat_interleave(32, 1)  # whatever numbers such a scale is of
    assert torch.equal(is_nan, restored.isnan())
    assert torch.equal(is_nan, expected.isnan())
    assert torch.equal(found.data.view(torch.uint8)[~is_nan], theirs.qdata.view(torch.uint8)[~is_nan])
    # Where torchao writes its least scale, 2 ** -127, it has divided by 2 ** -126: see pytorch/ao, issue 1104.
    is_least = theirs.scale.view(torch.uint8) == 0
    wide = is_least.repeat_interleave(32, 1)
    assert (of_block[is_least] == 2.0**-126).all()
    assert torch.equal(of_block[~is_least].nan_to_num(), theirs.scale.float()[~is_least].nan_to_num())
    assert torch.equal(restored.nan_to_num(), torch.where(wide, 2 * expected, expected).nan_to_num())
    assert is_least.any() == (name in ("only zeros", "subnormal"))


@pytest.mark.parametrize("rows", [64, 20])
def test_products_of_mxfp8_are_those_of_torchaos_numbers(rows: int) -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def restored(x: Tensor) -> Tensor:
        missing = -x.shape[1] % 32
        blocks = nn.functional.pad(x, (0, missing)).contiguous()
        return MXTensor.to_mx(blocks, E4M3, 32).dequantize(torch.float32)[:, : x.shape[1]]

    torch.manual_seed(0)
    model = nn.Linear(96, 64, bias=False)
    with torch.no_grad():
        model.weight.copy_(model.weight.to(LOW))
    x, gradient = ((torch.randn(rows, n) * torch.randn(n).exp()).to(LOW).float() for n in (96, 64))
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"], "recipe": "mxfp8"}]})
    found = run(autocastfx.convert(model, (x,), dtype=LOW, op_list=lists), x, gradient)
    weight = model.weight.detach()
    expected = (
        restored(x) @ restored(weight).t(),
        restored(gradient) @ restored(weight.t()).t(),
        restored(gradient.t()) @ restored(x.t()).t(),
    )
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted.to(LOW))


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
