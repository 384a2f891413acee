"""Products of odd sizes are padded for CUDA's kernels, and masks laid out anew; both change no number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx.errors import ArgumentError
from autocastfx.policy.kernel_facts import load_kernel_facts

LOW = torch.bfloat16
ROWS, WIDTH, ODD = 256, 128, 131  # enough rows to be padded


def converted(model: nn.Module, *inputs: Any, device: str = "cuda", **options: Any) -> Any:
    """Return the model as it is converted for a CUDA device, on which it does not run here."""
    given = {"dtype": LOW, "device": device, "check": False, "keep_output_dtype": False, **options}
    return autocastfx.convert(model, inputs, **given)


class Product(nn.Module):
    """A product written in some way, and what reads it."""

    def __init__(
        self,
        multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
        shape: tuple[int, int],
        read: Callable[[Tensor], Any],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape) / 32)
        self.bias = nn.Parameter(torch.randn(max(shape)))
        self.multiply, self.read = multiply, read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.multiply(x, self.weight, self.bias))


def _loss(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), torch.arange(ROWS))


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, int], tuple[int, ...]]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (ODD, WIDTH), (2, ROWS // 2, WIDTH)),
    "linear without bias": (lambda x, w, b: F.linear(x, w), (ODD, WIDTH), (2, ROWS // 2, WIDTH)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (WIDTH, ODD), (ROWS, WIDTH)),
    "mm": (lambda x, w, b: torch.mm(x, w), (WIDTH, ODD), (ROWS, WIDTH)),
    "matmul": (lambda x, w, b: x @ w, (WIDTH, ODD), (2, ROWS // 2, WIDTH)),
    "inner size": (lambda x, w, b: x @ w, (ODD, WIDTH), (2, ROWS // 2, ODD)),
    "both sizes": (lambda x, w, b: F.linear(x, w), (ODD, 67), (2, ROWS // 2, 67)),
}


def results(amp: Any, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    x = x.clone().requires_grad_()
    amp.zero_grad()
    made = amp(x)
    made.float().square().sum().backward()
    return [made, x.grad, *(p.grad for p in amp.parameters() if p.grad is not None)]


@pytest.fixture
def few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few columns are padded, too."""
    monkeypatch.setattr("autocastfx.passes.align._LEAST_FLOPS", 0)


@pytest.mark.usefixtures("few_columns")
@pytest.mark.parametrize("weights", ["cast", "cached"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_padded_product_gives_the_same(name: str, weights: str) -> None:
    """The output and all gradients are those of the product that is not padded."""
    multiply, shape, size = PRODUCTS[name]
    read = nn.Identity() if "inner" in name else (lambda y: y if y.shape[-1] != ODD else y.softmax(-1))
    model, x = Product(multiply, shape, read), torch.randn(size, generator=torch.Generator().manual_seed(1))
    padded = converted(model, x, weights=weights)
    plain = converted(model, x, weights=weights, recompose=False)
    assert [one.pattern for one in padded.plan.recomposed] == ["aligned_product"]
    assert not plain.plan.recomposed
    for ours, other in zip(results(padded, x), results(plain, x), strict=True):
        assert torch.equal(ours, other)
        assert ours.dtype == other.dtype


@pytest.mark.usefixtures("few_columns")
def test_a_size_of_the_batch_is_not_padded() -> None:
    """Each text of a batch is compared with each image: how many columns there are is another number in other calls."""
    model = Product(lambda x, w, b: (x @ w) @ (x @ w).mT, (64, 64), nn.Identity())
    xs = [torch.randn(size, 64, generator=torch.Generator().manual_seed(1)) for size in (259, 301, 333, 257)]
    amp, plain = converted(model, xs[0]), converted(model, xs[0], recompose=False)
    for x in xs:
        for ours, other in zip(results(amp, x), results(plain, x), strict=True):
            assert torch.equal(ours, other)


def test_the_loss_over_a_vocabulary_is_the_same() -> None:
    model = Product(PRODUCTS["linear"][0], (4099, 1024), _loss)  # just large enough
    x = torch.randn(2, ROWS // 2, 1024, generator=torch.Generator().manual_seed(1))
    padded, plain = converted(model, x), converted(model, x, recompose=["loss_cast"])
    assert "aligned_product" in {one.pattern for one in padded.plan.recomposed}
    assert all(torch.equal(*pair) for pair in zip(results(padded, x), results(plain, x), strict=True))
    assert "recomposed: aligned_product" in autocastfx.explain(padded, "linear")


def _written(y: Tensor) -> Tensor:
    y[:, 0] = 1.0
    return y.softmax(-1)


UNPADDED: dict[str, tuple[Product, tuple[int, ...], dict[str, Any]]] = {
    "few rows": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), nn.Identity()), (128, WIDTH), {}),
    "aligned": (Product(PRODUCTS["mm"][0], (WIDTH, 136), nn.Identity()), (ROWS, WIDTH), {}),
    "for a CPU": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), nn.Identity()), (ROWS, WIDTH), {"device": "cpu"}),
    "not asked for": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), nn.Identity()), (ROWS, WIDTH), {"recompose": ["silu"]}),
    "viewed otherwise": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), lambda y: y.view(-1)), (ROWS, WIDTH), {}),
    "viewed behind a view": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), lambda y: y[1:].view(-1)), (ROWS, WIDTH), {}),
    "viewed behind a split": (
        *(Product(PRODUCTS["mm"][0], (WIDTH, ODD), lambda y: y.split(8)[1].view(-1)), (ROWS, WIDTH)),
        {},
    ),
    "strided": (
        *(Product(PRODUCTS["mm"][0], (WIDTH, ODD), lambda y: y.as_strided((4, 2), (2, 1))), (ROWS, WIDTH)),
        {},
    ),
    "read as bytes": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), lambda y: y.view(torch.int8)), (ROWS, WIDTH), {}),
    "written into": (Product(PRODUCTS["mm"][0], (WIDTH, ODD), _written), (ROWS, WIDTH), {}),
}


@pytest.mark.usefixtures("few_columns")
@pytest.mark.parametrize("name", UNPADDED)
def test_stays_as_it_is(name: str) -> None:
    """Products stay with few rows or fitting sizes, if not asked for, or if strides are read; results are the same."""
    model, size, options = UNPADDED[name]
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    amp = converted(model, x, **options)
    assert "aligned_product" not in {one.pattern for one in amp.plan.recomposed}
    assert torch.equal(amp(x), converted(model, x, recompose=False)(x))


class Attention(nn.Module):
    """Attention under a bias that is made for all heads at once, as T5 makes it."""

    def __init__(self, heads: int = 2, length: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Embedding(length * length, heads)
        self.length = length

    def forward(self, q: Tensor) -> Tensor:
        pairs = torch.arange(self.length**2).view(self.length, self.length)
        bias = self.bias(pairs).permute(2, 0, 1)[None].expand(q.shape[0], -1, -1, -1)
        once = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        return F.scaled_dot_product_attention(once, q, q, attn_mask=bias)


def test_a_mask_is_laid_out_once() -> None:
    """Attention reads a mask whose last stride is 1; a dimension that repeats takes no memory."""
    model, q = Attention(), torch.randn(3, 2, 8, 16, generator=torch.Generator().manual_seed(1))
    amp, plain = converted(model, q), converted(model, q, recompose=False)
    assert [one.pattern for one in amp.plan.recomposed] == ["dense_mask", "dense_mask"]
    masks = [node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"] for node in _attention(amp)]
    assert len(set(masks)) == 1
    assert masks[0].meta["val"].stride(-1) == 1
    assert masks[0].meta["val"].stride(0) == 0
    for ours, other in zip(results(amp, q), results(plain, q), strict=True):
        assert torch.equal(ours, other)


def _attention(amp: Any) -> list[Any]:
    return [node for node in amp.graph.nodes if "scaled_dot_product_attention" in str(node.target)]


def test_a_mask_that_fits_stays() -> None:
    class Masked(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, mask = torch.randn(3, 2, 8, 16), torch.zeros(3, 1, 8, 8)
    assert not converted(Masked(), q, mask).plan.recomposed
    assert converted(Masked(), q, mask.mT).plan.recomposed


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="aligned_product, grouped_attention, dense_mask"):
        converted(nn.Linear(2, 2), torch.ones(2, 2), recompose=["aligned"])


class Feed(nn.Module):
    """Products of a module that a list lets run in TF32, and of one that it keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wi, self.wo = nn.Linear(8, 16), nn.Linear(16, 8)
        self.mixing = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.mixing[0], self.wo(self.wi(x).relu()), self.mixing)


IN_TF32 = [{"path": "wo", "category": "tf32"}, {"path": "wi", "category": "float32"}]
TF32 = autocastfx.OpList.of({"modules": IN_TF32}, name="tf32")


def test_a_list_lets_products_run_in_tf32() -> None:
    """They are float32 products in the plan, and the same numbers off a GPU."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    amp = converted(Feed(), x, op_list=["default", TF32])
    assert [(one.pattern, one.node) for one in amp.plan.recomposed] == [("tf32_product", "linear_1")]
    assert "float32" in autocastfx.explain(amp, "linear_1")
    plain = converted(Feed(), x, op_list=["default", TF32], recompose=False)
    assert not plain.plan.recomposed
    for ours, other in zip(results(amp, x), results(plain, x), strict=True):
        torch.testing.assert_close(ours, other)
    everywhere = autocastfx.OpList.of({"modules": [{"path": "**", "category": "tf32"}]}, name="all")
    patterns = [one.pattern for one in converted(Feed(), x, op_list=["default", everywhere]).plan.recomposed]
    assert patterns == ["tf32_product"] * 3
    assert not converted(Feed(), x, op_list=["default", TF32], device="cpu").plan.recomposed


def test_what_a_model_keeps_for_its_range_runs_in_tf32() -> None:
    """transformers keeps T5's ``wo`` in float32 beside float16, whose range is too small."""

    class Kept(Feed):
        _keep_in_fp32_modules = ("wo",)

    x = torch.randn(4, 8)
    amp = converted(Kept(), x, dtype="float16")
    assert [one.node for one in amp.plan.recomposed] == ["linear_1"]
    assert "run in TF32 on CUDA" in autocastfx.explain(amp, "linear_1")
    assert not converted(Kept(), x, dtype="bfloat16").plan.recomposed


# Products whose weights get float32 gradients straight from backward.


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are worth a backward of their own, too."""
    facts = replace(load_kernel_facts(), float32_gradients={"cuda": 1})
    monkeypatch.setattr("autocastfx.options.load_kernel_facts", lambda: facts)


def exact_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return results(copy.deepcopy(model).double(), x.double())[2:]


def distances(made: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(made, exact, strict=True)]


WIDE = {name: PRODUCTS[name] for name in ("linear", "linear without bias", "addmm", "mm", "matmul")}


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("weights", ["cast", "cached"])
@pytest.mark.parametrize("name", WIDE)
def test_a_weight_gets_a_float32_gradient(name: str, weights: str) -> None:
    """Output and the input's gradient are the same; those of weight and bias are nearer to float64's."""
    multiply, (first, second), size = WIDE[name]
    shape, size = (min(first, 64), min(second, 64)), (*size[:-1], 64)
    model = Product(multiply, shape, nn.Identity())
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    wide, plain = converted(model, x, weights=weights), converted(model, x, weights=weights, recompose=False)
    assert [one.pattern for one in wide.plan.recomposed] == ["wide_linear"]
    assert "recomposed: wide_linear" in autocastfx.explain(wide, wide.plan.recomposed[0].node)
    ours, others = results(wide, x), results(plain, x)
    assert torch.equal(ours[0], others[0])
    torch.testing.assert_close(ours[1], others[1], rtol=torch.finfo(LOW).eps, atol=0)
    exact = exact_gradients(model, x)
    assert len(exact) == len(ours) - 2 == (2 if name in ("linear", "addmm") else 1)
    for one, other in zip(distances(ours[2:], exact), distances(others[2:], exact), strict=True):
        assert one < other


def _scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w, alpha=2)


def _changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    once = w * 2
    low = x @ once
    once.mul_(3)
    return low + x @ once


def _batched(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.unflatten(0, (4, 16)) @ w.unflatten(1, (4, 16)).movedim(1, 0)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("multiply", [_scaled, _changed, _batched])
def test_others_stay(multiply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Scaled products, weights that are written to, and batches of them."""
    model, x = Product(multiply, (64, 64), nn.Identity()), torch.randn(64, 64)
    amp = converted(model, x)
    assert not amp.plan.recomposed
    for ours, other in zip(results(amp, x), results(converted(model, x, recompose=False), x), strict=True):
        assert torch.equal(ours, other)


def test_only_large_products_of_training_get_them() -> None:
    model = Product(PRODUCTS["mm"][0], (1024, 4096), nn.Identity())
    assert not converted(model, torch.randn(64, 1024)).plan.recomposed
    large = torch.randn(4096, 1024)
    assert [one.pattern for one in converted(model, large).plan.recomposed] == ["wide_linear"]
    assert not converted(model.eval(), large).plan.recomposed
    assert not converted(model.train(), large, device="cpu").plan.recomposed


@pytest.mark.usefixtures("every_size")
def test_copies_stay_for_a_backward_that_waits() -> None:
    """A step renews working copies; what an earlier call has read stays as it was for that call's backward."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

    def gradients(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        amp = converted(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), x, weights="cached", **options)
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.5)
        waiting = amp(x)
        amp(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        amp(x)
        waiting.float().square().sum().backward()
        return [p.grad for p in amp.parameters() if p.grad is not None]

    for ours, other in zip(gradients(), gradients(recompose=False), strict=True):
        assert float((ours - other).norm()) <= 4 * torch.finfo(LOW).eps * float(other.norm())
