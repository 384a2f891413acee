""".float() islands, float64 and complex."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autocastfx.errors import StateWarning
from autocastfx.graph.names import op_name
from autocastfx.plan.plan import Precision
from tests.invariants.pair import LOW, Net, Pair, inserted_casts, net, placed

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


def _island(m: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = m.a(x)
    inside = y.float()
    inside = torch.tanh(inside) * 3.0
    return m.b(inside), m.b(y), m.b(torch.sigmoid(y))


@pytest.mark.parametrize("low", LOW)
def test_a_float_island_is_kept_and_drags_nothing_along(low: torch.dtype) -> None:
    x = torch.randn(3, 8)
    pair = Pair.of(net(_island), (x,), low)
    pair.agree(x)
    amp_model = pair.amp_model
    assert placed(amp_model, "to") == [Precision.FLOAT32]
    assert placed(amp_model, "tanh") == placed(amp_model, "mul") == [Precision.FLOAT32]
    assert placed(amp_model, "sigmoid") == [Precision.LOW], "the use of the same value outside"
    (linear, *_) = [n for n in amp_model.graph.nodes if op_name(n) == "linear"]
    readers = {op_name(reader) for reader in linear.users}
    assert {"linear", "sigmoid"} <= readers, "both read the low value itself"


@pytest.mark.parametrize("low", LOW)
def test_a_cast_back_that_follows_another_value_ends_an_island(low: torch.dtype) -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(torch.softmax(y.float(), -1).type_as(y) @ y.t() @ y)

    x = torch.randn(8, 8)
    pair = Pair.of(net(run), (x,), low)
    pair.agree(x)
    assert placed(pair.amp_model, "softmax") == [Precision.FLOAT32]
    assert placed(pair.amp_model, "matmul") == [Precision.LOW] * 2
    assert sum(str(c.args[1]) == "torch.float32" for c in inserted_casts(pair.amp_model)) <= 2


def _double(m: Net, x: Tensor) -> Any:
    exact = x.double().cumsum(0) * math.pi
    return exact, m.b(m.a(x).double().cumsum(0).float()), torch.linspace(0, 1, 5, dtype=torch.float64)


@pytest.mark.parametrize("low", LOW)
def test_float64_is_kept(low: torch.dtype) -> None:
    x = torch.randn(3, 8)
    pair = Pair.of(net(_double), (x,), low)
    found, expected = pair.agree(x)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])


def test_a_float64_model_is_unchanged() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.warns(StateWarning, match="are float64, and only float32 values are converted"):
        pair = Pair.of(net(lambda m, x: m.b(m.a(x).tanh())).double(), (x,), torch.float16)
    found, expected = pair.agree(x)
    assert torch.equal(found, expected)
    assert not inserted_casts(pair.amp_model)


def _complex(m: Net, x: Tensor, rotation: Tensor) -> Any:
    pairs = torch.view_as_complex(m.a(x).reshape(3, 4, 2).contiguous())
    turned = torch.view_as_real(pairs * rotation).flatten(1)
    return m.b(turned), torch.fft.irfft(torch.fft.rfft(m.a(x)) * 2), rotation.abs(), x.to(torch.complex64) @ m.w


@pytest.mark.parametrize("low", LOW)
def test_complex_paths_are_kept(low: torch.dtype) -> None:
    x, rotation = torch.randn(3, 8), torch.polar(torch.ones(3, 4), torch.randn(3, 4))
    pair = Pair.of(net(_complex, w=torch.randn(8, 8, dtype=torch.complex64)), (x, rotation), low)
    found, expected = pair.agree(x, rotation)
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[3], expected[3])
