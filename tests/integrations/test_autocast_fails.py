"""What fails under torch.autocast, in place of what could not be converted, runs in float32, and that is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import CompileBackend, UncapturedGraphWarning
from autocastfx.capture import dynamo_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


class Sparse(nn.Module):
    """A product with a sparse matrix, which is held, or made in forward."""

    def __init__(self, is_held: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        matrix = (torch.rand(30, 30) < 0.2).float()
        self.register_buffer("matrix", matrix.to_sparse() if is_held else matrix)

    def forward(self, x: Tensor) -> Tensor:
        matrix: Tensor = self.get_buffer("matrix")
        if not matrix.is_sparse:
            torch._dynamo.graph_break()
            matrix = matrix.to_sparse()
        return torch.sparse.mm(matrix, self.layer(x))


class Strict(nn.Module):
    """Code that Dynamo skips, and that torch.autocast makes fail: it writes products into float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(30, 16)
        for row in range(30):
            if x[row].sum().item() < 1e9:
                found = found.scatter(0, torch.full((1, 16), row), self.layer(x[row : row + 1]))
        return found


def steps(model: nn.Module, x: Tensor) -> list[str]:
    """Train three steps, compare them to float32, and return the warnings."""
    exact = model(x).detach()
    autocastfx.enable(model, dtype=LOW)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UncapturedGraphWarning)
        for _ in range(3):
            found = model(x)
            found.sum().backward()
            assert torch.allclose(found, exact, rtol=0.05, atol=0.05)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("is_held", [True, False])
def test_sparse_products_train_in_float32(is_held: bool) -> None:
    told = steps(Sparse(is_held), torch.randn(30, 16))
    assert "fails under torch.autocast (sparse tensors have no gradients there), and runs in float32" in told[-1]


def test_code_that_fails_under_autocast_runs_in_float32() -> None:
    told = steps(nn.Sequential(Strict(), nn.Linear(16, 4)), torch.randn(30, 16))
    assert len(told) == 2
    assert told[-1].startswith("0 fails under torch.autocast (scatter(): ")
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_of_the_model_stays() -> None:
    model, x = Strict(), torch.randn(30, 16)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning):
        model(x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(30, 8))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_graph_that_fails_under_autocast_runs_in_float32(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no graph of")

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(3, 4).scatter(0, torch.arange(3)[:, None].expand(3, 4), self.layer(x))

    monkeypatch.setattr(dynamo_graph, "_traced", refuse)
    model, x = Writes(), torch.randn(3, 4)
    exact = model(x)
    CompileBackend(dtype=LOW, inner=inner).compile(model)
    with pytest.warns(UncapturedGraphWarning) as told:
        found = model(x)
    assert str(told[-1].message).startswith("the graph fails under torch.autocast (scatter")
    found.sum().backward()
    assert torch.equal(found, exact)
    assert torch.equal(model(x), exact)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"):
        pass
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
