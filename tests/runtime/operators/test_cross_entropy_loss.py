"""The float32 cross entropy of 16-bit scores: over a vocabulary in parts; else as torch computes it, or rounding."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autocastfx
from autocastfx.errors import UnsupportedError
from autocastfx.runtime.operators import cross_entropy_loss as module
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from tests.decided import rewritten
from tests.helpers import Function, relative_error, text

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


@pytest.fixture(params=["whole", "parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether rows of scores are computed all at once, or in parts of one row."""
    if request.param == "parts":
        for name in ("_CLASSES", "_PER_THREAD", "_PARTS"):
            monkeypatch.setattr(module, name, 1)
    return str(request.param)


@pytest.fixture
def rounds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of few scores the logarithms are kept rounded."""
    monkeypatch.setattr(module, "_ROUNDED", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradient_are_float32s_to_the_bit(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, way: str
) -> None:
    x, target = scores(shape, dtype)
    found, wanted = cross_entropy_loss(x, target, **options), of_float32(x, target, **options)
    assert found.dtype == torch.float32
    assert found.equal(wanted)
    out = torch.rand_like(found)
    (of_found,), (of_wanted,) = torch.autograd.grad(found, x, out), torch.autograd.grad(wanted, x, out)
    assert of_found.dtype == dtype
    assert of_found.equal(of_wanted)
    with torch.no_grad():
        assert cross_entropy_loss(x, target, **options).equal(wanted)


@pytest.mark.usefixtures("rounds_all")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if "weight" not in o], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_where_it_rounds_the_loss_is_the_same_and_the_gradient_rounded(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    x, target = scores(shape, dtype)
    found, wanted = cross_entropy_loss(x, target, **options, rounds=True), of_float32(x, target, **options)
    assert found.equal(wanted)
    out = torch.rand_like(found)
    (of_found,), (of_wanted,) = torch.autograd.grad(found, x, out), torch.autograd.grad(wanted, x, out)
    assert of_found.dtype == dtype
    assert relative_error(of_found, of_wanted) <= 2 * torch.finfo(dtype).eps  # of the logarithms, and of their weight


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ROWS, CLASSES = 4097, 1024


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rounds", [False, True])
def test_over_a_vocabulary_it_is_computed_in_parts(rounds: bool) -> None:
    """No float32 tensor holds them all, and nothing but the scores is kept."""
    x, target = torch.randn(ROWS, CLASSES, dtype=torch.bfloat16).requires_grad_(), torch.arange(ROWS) % CLASSES
    wanted = of_float32(x, target)
    kept: list[Tensor] = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = cross_entropy_loss(x, target, rounds=rounds)
        (of_found,) = torch.autograd.grad(found, x)
    assert found.equal(wanted)
    assert of_found.equal(torch.autograd.grad(wanted, x)[0])
    assert largest.elements == 2**19
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert storages.pop(x.untyped_storage().data_ptr()) == 2 * ROWS * CLASSES
    assert sum(storages.values()) == 8 * ROWS + 4, "targets, and how many"


SMALLER = {"rows": (ROWS - 1, CLASSES), "classes": (2 * ROWS, CLASSES - 1), "image": (1, CLASSES, 1, ROWS)}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", SMALLER.values(), ids=SMALLER)
def test_fewer_rows_or_classes_and_images_are_computed_at_once(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
    with Largest() as largest:
        cross_entropy_loss(x, torch.zeros(shape[:1] + shape[2:], dtype=torch.long))
    assert largest.elements == x.numel()


@pytest.mark.parametrize("made", [nn.Parameter, lambda x: x.as_subclass(Own)], ids=["parameter", "subclass"])
def test_what_is_no_plain_tensor_is_computed_at_once(made: Callable[[Tensor], Tensor], way: str) -> None:
    x, target = scores((6, 8), torch.bfloat16)
    with Largest() as largest:
        assert cross_entropy_loss(made(x.detach()), target).equal(of_float32(x, target))
    assert largest.elements == 6 * 8


class Own(Tensor):
    pass


class Largest(TorchDispatchMode):
    """Looks out for the float32 tensor of most elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.dtype == torch.float32]
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_parts_give_the_same_and_take_less_memory(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, classes = 8192, 32_000
    x = torch.randn(rows, classes, device="cuda", dtype=dtype).requires_grad_()
    target = torch.arange(rows, device="cuda")
    wanted = of_float32(x, target)
    of_wanted = torch.autograd.grad(wanted, x)[0]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = cross_entropy_loss(x, target)
    of_found = torch.autograd.grad(found, x)[0]
    assert torch.cuda.max_memory_allocated() - before < 4 * x.numel(), "less than one float32 copy"
    assert (
        relative_error(found.detach(), wanted.detach()) <= 4 * torch.finfo(torch.float32).eps
    )  # of sums in another order
    assert relative_error(of_found, of_wanted) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("rounds", [False, True])
def test_several_gradients_at_once(rounds: bool, way: str) -> None:
    x, target = scores((6, 8), torch.bfloat16)
    several = torch.tensor([1.0, 2.0])
    found, wanted = (
        torch.autograd.grad(loss, x, several, is_grads_batched=True)[0]
        for loss in (cross_entropy_loss(x, target, rounds=rounds), of_float32(x, target))
    )
    assert found.shape == (2, 6, 8)
    assert relative_error(found, wanted) <= 2 * torch.finfo(torch.bfloat16).eps


def test_targets_of_eight_bits_are_no_other_numbers(way: str) -> None:
    """In eight bits -100, which is ignored, would be 156."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    target = torch.tensor([156, 156, 3], dtype=torch.uint8)
    found, wanted = cross_entropy_loss(x, target), of_float32(x, target)
    assert found.equal(wanted)
    assert torch.autograd.grad(found, x)[0].equal(torch.autograd.grad(wanted, x)[0])


@pytest.mark.parametrize("targets", [5, 7])
def test_as_many_targets_as_rows_are_asked_for(targets: int, way: str) -> None:
    x, _ = scores((6, 8), torch.bfloat16)
    with pytest.raises(ValueError, match=rf"batch_size \(6\) to match target batch_size \({targets}\)"):
        cross_entropy_loss(x, torch.zeros(targets, dtype=torch.long))


def test_scores_that_are_written_to_after_the_loss(way: str) -> None:
    """The model is differentiated as it was, for torch's cross entropy does not keep its scores."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(8, 8)

        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            found = self.scores(x)
            loss = functional.cross_entropy(found, target)
            found.view(-1).mul_(2.0)
            return loss, found

    model, inputs = Model(), (torch.randn(6, 8), torch.arange(6))
    for fold in ("exact", "kernel"):
        amp_model = autocastfx.convert(model, inputs, dtype=torch.bfloat16, fold=fold)
        amp_model(*inputs)[0].backward()
        plain = torch.autograd.grad(model(*inputs)[0], model.scores.weight)[0]
        assert model.scores.weight.grad is not None
        assert relative_error(model.scores.weight.grad, plain) <= 8 * torch.finfo(torch.bfloat16).eps
        model.zero_grad()


def test_where_every_target_is_ignored_it_is_as_torchs(way: str) -> None:
    x, _ = scores((6, 8), torch.bfloat16)
    target = torch.full((6,), -100)
    found = cross_entropy_loss(x, target)
    assert found.isnan()
    assert torch.autograd.grad(found, x)[0].equal(torch.autograd.grad(of_float32(x, target), x)[0])


def test_a_class_that_there_is_not_is_refused(way: str) -> None:
    x, _ = scores((6, 8), torch.bfloat16)
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        cross_entropy_loss(x, torch.arange(3, 9))


def test_it_can_be_differentiated_twice(way: str) -> None:
    x, target = scores((6, 8), torch.bfloat16)
    found, wanted = (
        torch.autograd.grad(torch.autograd.grad(loss(x, target), x, create_graph=True)[0].square().sum(), x)[0]
        for loss in (cross_entropy_loss, of_float32)
    )
    assert found.equal(wanted)
    assert found.count_nonzero()


@pytest.mark.usefixtures("rounds_all")
def test_a_mean_over_many_targets_is_divided_in_float32() -> None:
    """Their number has no 16 bits: in bfloat16 1001 would be 1000, in float16 70,001 would be infinite."""
    for dtype, rows in ((torch.bfloat16, 1001), (torch.float16, 70_001)):
        x, target = scores((rows, 8), dtype)
        (found,) = torch.autograd.grad(cross_entropy_loss(x, target, rounds=True), x, torch.tensor(1024.0))
        (wanted,) = torch.autograd.grad(of_float32(x, target), x, torch.tensor(1024.0))
        assert relative_error(found, wanted) <= 2 * torch.finfo(dtype).eps


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim == 2 else x.transpose(2, 3).contiguous().transpose(2, 3),
    "classes last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.usefixtures("rounds_all")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "keeps"])
def test_scores_may_lie_in_any_way(
    shape: tuple[int, ...], layout: Callable[[Tensor], Tensor], rounds: bool, way: str
) -> None:
    x, target = scores(shape, torch.bfloat16)
    found, wanted = cross_entropy_loss(layout(x), target, rounds=rounds), of_float32(layout(x), target)
    assert found.equal(wanted)
    (of_found,), (of_wanted,) = torch.autograd.grad(found, x), torch.autograd.grad(wanted, x)
    assert relative_error(of_found, of_wanted) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.usefixtures("rounds_all")
def test_where_it_rounds_it_cannot_be_differentiated_twice_and_says_so() -> None:
    x, target = scores((6, 8), torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"differentiated twice: convert the model with fold='exact'"):
        torch.autograd.grad(cross_entropy_loss(x, target, rounds=True), x, create_graph=True)


@pytest.mark.parametrize("weight", [1e-9, 1e5])
def test_weights_of_classes_that_sixteen_bits_do_not_have_are_not_rounded(weight: float) -> None:
    x, target = scores((6, 8), torch.float16)
    weights = torch.full((8,), weight)
    (found,) = torch.autograd.grad(cross_entropy_loss(x, target, weights, rounds=True), x)
    assert found.equal(torch.autograd.grad(of_float32(x, target, weight=weights), x)[0])


def test_few_scores_are_not_rounded_which_would_take_longer_than_it_saves() -> None:
    x, target = scores((64, 8), torch.bfloat16)
    (found,) = torch.autograd.grad(cross_entropy_loss(x, target, rounds=True), x)
    assert found.equal(torch.autograd.grad(of_float32(x, target), x)[0])


@pytest.mark.usefixtures("rounds_all")
def test_where_it_rounds_it_keeps_two_bytes_for_each_score() -> None:
    x, target = scores((64, 8), torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy_loss(x, target, rounds=True)
    assert sorted(t.untyped_storage().nbytes() for t in kept) == [4, 8 * 64, 2 * 64 * 8]


@pytest.mark.parametrize("rounds", [False, True])
def test_it_computes_under_fake_tensors_a_transform_and_a_compiler(rounds: bool, way: str) -> None:
    def computed(x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy_loss(x, target, rounds=rounds)

    x, target = scores((6, 8), torch.bfloat16)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert computed(torch.empty(6, 8, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int64)).shape == ()
    (wanted,) = torch.autograd.grad(of_float32(x, target), x)
    assert torch.func.grad(computed)(x.detach(), target).equal(wanted)
    (found,) = torch.autograd.grad(torch.compile(computed, backend="aot_eager")(x, target), x)
    assert relative_error(found, wanted) <= 2 * torch.finfo(torch.bfloat16).eps


def test_a_compiler_and_an_exporter_see_no_parts(way: str) -> None:
    graphs: list[fx.Graph] = []
    x, target = scores((6, 8), torch.bfloat16)

    def seen(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module

    torch.compile(cross_entropy_loss, backend=aot_autograd(fw_compiler=seen))(x, target)
    graphs.append(make_fx(cross_entropy_loss, tracing_mode="fake")(x.detach(), target).graph)
    for graph in graphs:
        assert ["log_softmax" in str(node.target) for node in graph.nodes].count(True) == 1


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), target)


def test_a_model_converted_with_fold_kernel_has_it() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x @ w, target)

    inputs = torch.randn(6, 8), torch.randn(8, 8), torch.arange(6)
    assert rewritten(loss, *inputs, dtype=torch.bfloat16, fold="kernel") == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          cross_entropy_loss: f32 = cross_entropy_loss(matmul, args_2)
          return cross_entropy_loss
    """)
    amp_model = autocastfx.convert(Function(loss), inputs, dtype=torch.bfloat16, fold="kernel")
    assert amp_model.plan["cross_entropy_loss"].op == "cross_entropy_loss"
    assert cross_entropy_loss in {node.target for node in amp_model.graph.nodes}


def test_a_converted_model_trains_copies_and_pickles_as_with_its_parts() -> None:
    torch.manual_seed(0)
    model, x, target = Classifier(), torch.randn(6, 8), torch.arange(6)
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
