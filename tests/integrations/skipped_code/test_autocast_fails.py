"""What fails under torch.autocast, in place of what could not be converted, runs in float32, and that is told."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import CompileBackend
from autocastfx.capture import dynamo_graph
from autocastfx.errors import UncapturedGraphWarning

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


class Exacting(nn.Module):
    """Code that Dynamo skips, and that is right in float32 alone, as numpy and checks of values are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        for row in range(3):
            if x[row].sum().item() > 1e9:
                found = found + 1
        if self.kind == "numpy":
            return found + torch.from_numpy(found.detach().numpy())
        product = found @ (1e-6 * torch.eye(16)) + 1
        assert self.kind != "assert" or (product != 1).any()
        if self.kind == "divides":
            return found + 1 / (product != 1).sum().item()
        return found


@pytest.mark.parametrize(
    ("kind", "said"), [("numpy", "unsupported ScalarType"), ("assert", ""), ("divides", "division by zero")]
)
def test_any_error_that_16_bits_make_leads_to_float32(kind: str, said: str) -> None:
    told = steps(Exacting(kind), torch.randn(30, 16))
    assert len(told) == 2
    assert told[-1].startswith("(the model) fails under torch.autocast (")
    assert said in told[-1]


def test_an_error_of_another_kind_is_the_models_own() -> None:
    class Stop(Exception):
        """As hooks raise where the rest of a model is not needed."""

    seen = list[torch.dtype]()

    def hook(*given: Any) -> None:
        seen.append(given[-1].dtype)
        raise Stop

    model, x = Exacting(""), torch.randn(30, 16)
    steps(model, x)
    model.layer.register_forward_hook(hook)
    with pytest.raises(Stop):
        model(x)
    assert seen == [LOW]


class Product(torch.autograd.Function):
    """A product as written for float32: its backward multiplies gradients by what it has saved."""

    calls: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        Product.calls["forward"] += 1
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Product.calls["backward"] += 1
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.mT, x.mT @ gradients[0]


class CastProduct(Product):
    """The same, as torch says that it should be written."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return Product.forward(ctx, x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return Product.backward(ctx, *gradients)


class Found:
    """An output that holds tensors, and is no pytree."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Multiplied(nn.Module):
    """Code that Dynamo skips, with a custom function."""

    def __init__(self, function: type[Product], holds: bool = False) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4)
        self.function, self.holds = function, holds

    def forward(self, x: Tensor) -> Any:
        found = self.layer(x)
        for _ in range(2):
            if x.sum().item() < 1e9:
                found = self.function.apply(found, self.weight)
        return Found(found) if self.holds else found


class Reads(nn.Module):
    def forward(self, found: Found) -> Tensor:
        return found.values * 2


@pytest.mark.parametrize("holds", [False, True])
def test_a_custom_function_whose_backward_fails_there_runs_in_float32(holds: bool) -> None:
    model, x = nn.Sequential(Multiplied(Product, holds), Reads() if holds else nn.Identity()), torch.randn(30, 16)
    told = steps(model, x)
    assert any(one.startswith("0 fails under torch.autocast (expected ") for one in told), told
    model.zero_grad()
    ours = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    autocastfx.disable(model)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for one, right in zip(ours, exact, strict=True):
        assert torch.allclose(one, right, rtol=1e-5, atol=1e-4)


def test_a_custom_function_that_casts_stays_under_autocast() -> None:
    model, x = Multiplied(CastProduct), torch.randn(30, 16)
    told = steps(model, x)
    assert len(told) == 1
    Product.calls.clear()
    model(x).sum().backward()
    assert Product.calls == {"forward": 2, "backward": 2}, "it is tried in the first call alone"


def test_a_custom_function_is_tried_in_evaluation_too() -> None:
    model, x = Multiplied(Product), torch.randn(30, 16)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning, match="cannot capture"), torch.no_grad():
        model(x)
    with pytest.warns(UncapturedGraphWarning, match="fails under torch.autocast"), torch.no_grad():
        model(x)
    model(x).sum().backward()


class Optional(CastProduct):
    """A product that writes into its input, and has outputs that have no gradient: None, indices, a word."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x.mul_(2), weight)
        return x @ weight.to(x.dtype), x, None, "a word"

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        product, written, *rest = gradients
        assert rest == [None, None]
        back = (product if product is not None else torch.zeros_like(x)).to(weight.dtype)
        through = back @ weight.mT + (written if written is not None else 0)
        return 2 * through, x.mT.to(weight.dtype) @ back


class Takes(Multiplied):
    def forward(self, x: Tensor) -> Any:
        found = self.layer(x)
        for _ in range(1):
            if x.sum().item() < 1e9:
                found, *_ = self.function.apply(found, self.weight)
        return found


class Picky(Product):
    """Its backward fails for 16 bits by an error that torch does not raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return Product.forward(ctx, x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return {torch.float32: Product.backward}[gradients[0].dtype](ctx, *gradients)


def test_a_trial_gives_a_function_the_gradients_that_autograd_gives() -> None:
    told = steps(Takes(Optional), torch.randn(30, 16))
    assert len(told) == 1, told


def test_any_error_of_a_trial_leads_to_float32() -> None:
    told = steps(Multiplied(Picky), torch.randn(30, 16))
    assert told[-1].startswith("(the model) fails under torch.autocast (torch.bfloat16)")


def test_what_a_custom_function_writes_and_draws_is_as_without_the_trial() -> None:
    class Noisy(CastProduct):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return Product.forward(ctx, x + torch.rand(16), weight)

    model, x = Multiplied(Noisy), torch.randn(30, 16)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning):
        model(x)
    found = list[Tensor]()
    for _ in range(2):  # the first of them tries
        torch.manual_seed(0)
        found.append(model(x))
    assert torch.equal(*found)


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


class Refusing(nn.Module):
    """Refuses some of its inputs, behind code that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.linear(x)
        if h.sum().item() > 1e9:
            return h
        if x.shape[0] == 3:
            raise ValueError(f"three rows in call {self.calls}")
        return h


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UncapturedGraphWarning")
def test_what_fails_by_itself_is_tried_in_float32_once() -> None:
    model = autocastfx.enable(Refusing(), dtype="bfloat16")
    for rows in (4, 3, 4, 3, 3, 4):
        if rows == 3:
            with pytest.raises(ValueError, match="three rows in call"):
                model(torch.randn(rows, 16))
        else:
            model(torch.randn(rows, 16))
    assert model.calls <= 7
