"""Abstract results for any size have the shapes, strides and dtypes of the kernels' results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import autocastfx
from autocastfx.graph.node import tensors
from autocastfx.graph.sizes import RECURRENT, any_size, own_sizes
from tests.helpers import Function, relative_error, unchecked

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
LOW = torch.bfloat16
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
}
OPTIONS = [
    {"bidirectional": both, "batch_first": first, "num_layers": layers, "bias": bias}
    for both, first, layers, bias in itertools.product((False, True), (False, True), (1, 2), (False, True))
]


def called(layer: nn.RNNBase, inputs: Any) -> tuple[Any, tuple[Any, ...], tuple[Tensor, ...]]:
    """The operator that a layer calls, its arguments, and its results."""
    calls: list[tuple[Any, tuple[Any, ...], tuple[Tensor, ...]]] = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                packet = getattr(torch.ops.aten, func.__name__)
                calls.append((packet.data if isinstance(inputs, PackedSequence) else packet.input, args, result))
            return result

    with Record():
        layer(inputs)
    return calls[0]


def like(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, theirs.requires_grad)
    assert ours.is_contiguous() == theirs.is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_results_are_like_the_kernels(kind: str, options: dict[str, Any], packed: bool) -> None:
    layer = LAYERS[kind](4, 5, **options)
    inputs: Tensor | PackedSequence = torch.randn(6, 7, 4)
    if packed:
        sizes = torch.full((inputs.shape[0 if options["batch_first"] else 1],), 3)
        inputs = pack_padded_sequence(inputs, sizes, batch_first=options["batch_first"])
    op, args, expected = called(layer, inputs)
    with FakeTensorMode() as mode:
        found = RECURRENT[op](*torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        like(ours, theirs)


def test_mixed_dtypes_are_refused_as_the_kernels_refuse_them() -> None:
    layer, x = nn.LSTM(4, 5), torch.randn(6, 7, 4)
    op, args, _ = called(layer, x)
    with pytest.raises(RuntimeError, match=r"takes one dtype, not torch\.bfloat16 and torch\.float32"):
        RECURRENT[op](args[0].to(LOW), *args[1:])


def test_torchs_own_kernels_are_back_afterwards() -> None:
    before = {op: dict(op.py_kernels) for op in RECURRENT}
    with any_size():
        assert all(op.py_kernels != held for op, held in before.items())
    assert {op: dict(op.py_kernels) for op in RECURRENT} == before


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(4,), (3, 4), (0, 4), (2, 3, 4), (1, 3, 4), (2, 1, 3, 4)])
def test_a_linear_layer_is_like_its_kernel(sizes: tuple[int, ...], bias: bool, learns: bool) -> None:
    layer, x = nn.Linear(4, 5, bias).requires_grad_(learns), torch.randn(sizes)
    for given in (x, x.transpose(0, -2) if x.ndim > 1 else x):
        with FakeTensorMode() as mode, any_size():
            args = [mode.from_tensor(t) for t in (given, *layer.parameters())]
            with enable_python_dispatcher():
                found = torch.ops.aten.linear.default(*args)
        like(found, layer(given))


@pytest.mark.parametrize(
    "sizes", [((2, 3), (5, 4)), ((2, 4), (5, 4, 1))], ids=["the sizes do not fit", "three dimensions"]
)
def test_a_linear_layer_that_cannot_be_called_is_refused(sizes: Any) -> None:
    with FakeTensorMode() as mode, any_size():
        args = [mode.from_tensor(torch.randn(size)) for size in sizes]
        with enable_python_dispatcher(), pytest.raises(RuntimeError, match=r"size|dimension|shape"):
            torch.ops.aten.linear.default(*args)


SLICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "up to": lambda x, n: x[:, :n],
    "from": lambda x, n: x[:, n:],
    "every second up to": lambda x, n: x[:, :n:2],
    "from the last ones": lambda x, n: x[:, -3:],
    "all but the last ones": lambda x, n: x[:, :-3],
    "some": lambda x, n: x[:, 3:5],
    "none": lambda x, n: x[:, 4:2],
    "in another dimension": lambda x, n: x[n:],
}


@unchecked
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_has_a_size_that_others_can_have_too(name: str) -> None:
    def sliced(x: Tensor, given: Tensor) -> Tensor:
        found = SLICES[name](x, given.shape[0])
        return found * SLICES[name](x.exp(), given.shape[0]) + torch.zeros_like(found)

    amp_model = autocastfx.convert(Function(sliced), (torch.randn(4, 6), torch.randn(5)), dtype=LOW)
    (variant,) = {id(one.captured): one.captured for one in amp_model.variants}.values()
    assert not any(free_unbacked_symbols(t) for node in variant.graph.nodes for t in tensors(node))
    for again in (False, True):
        before = len(amp_model.variants)
        for size, given in ((6, 5), (5, 5), (3, 5), (9, 1), (2, 0), (8, 4), (7, 3)):
            x = torch.randn(4, size)
            assert torch.equal(amp_model(x, torch.randn(given)), sliced(x, torch.randn(given)))
        assert not again or len(amp_model.variants) == before


def test_a_slice_that_ends_where_the_data_says_is_torchs_own() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, any_size():
        x, count = (mode.from_tensor(t) for t in (torch.randn(10), torch.tensor(3)))
        with enable_python_dispatcher():
            (size,) = x[: count.item()].shape
    assert free_unbacked_symbols(size)


class Tagger(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = LAYERS[kind](8, 8, **options)
        self.head = nn.LazyLinear(5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens))[0])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", OPTIONS[1::5], ids=str)
def test_one_graph_serves_all_batch_sizes_and_lengths(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tagger(kind, **options)
    model(torch.zeros(1, 1, dtype=torch.long))
    amp_model = autocastfx.convert(model, torch.randint(20, (4, 7)), dtype=LOW)
    for number, sizes in enumerate(2 * [(4, 7), (5, 9), (2, 4), (3, 16), (6, 3), (1, 4), (3, 1), (1, 1), (2, 100)]):
        tokens = torch.randint(20, sizes)
        ours, theirs = (one(tokens) for one in (amp_model, model))
        assert relative_error(ours.detach(), theirs.detach()) < 4 * torch.finfo(LOW).eps
        grads = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in (ours, theirs)]
        flat = [torch.cat([g.flatten() for g in grad]) for grad in grads]
        assert relative_error(*flat) < 4 * torch.finfo(LOW).eps
        if number in (1, 9):
            before = len(amp_model.variants)
        if number in (2, 3, 4) or number > 9:
            assert len(amp_model.variants) == before


def test_a_tracer_that_records_gets_what_the_kernels_do() -> None:
    """A rule's result has no values: recorded, it would be wrong numbers."""
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 5), torch.randn(6, 7, 4)
    linear = nn.Linear(4, 5)
    for call in (lambda x: layer(x)[0], linear, torch.vmap(linear)):
        with any_size(), torch.no_grad(), enable_python_dispatcher():
            traced = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        assert relative_error(traced(x).detach(), call(x).detach()) < 1e-5


def test_other_threads_and_compilers_inside_get_torchs_own() -> None:
    op = torch.ops.aten.linear.default

    def refusal() -> str:
        with FakeTensorMode() as mode, enable_python_dispatcher():
            args = [mode.from_tensor(t) for t in (torch.randn(2, 4), torch.randn(5, 3))]
            with pytest.raises(RuntimeError) as error:
                op(*args)
        return str(error.value)

    ours = "does not fit a weight of size"
    assert ours not in refusal()
    with any_size(), ThreadPoolExecutor(1) as other:
        assert ours in refusal()
        assert ours not in other.submit(refusal).result()
        with own_sizes():
            assert ours not in refusal()
            with any_size():
                assert ours in refusal()
        assert ours in refusal()
    assert ours not in refusal()
