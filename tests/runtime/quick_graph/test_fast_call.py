"""Quick calls: what stands in for an overload runs the same kernels on the same numbers, and keeps the same history."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autocastfx
from autocastfx.runtime.quick_graph import QUICK, add_one, lift, quickened


def quick_graph(graph: fx.Graph) -> fx.Graph:
    reads = [str(node.target) for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return quickened(lift(graph, list(dict.fromkeys(reads))))


def some(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)), requires_grad=True)


def computed(*sizes: int) -> Tensor:
    """No leaf, so that it can be written into."""
    return some(*sizes) * 1


IMAGES, KERNELS = (2, 3, 6, 6), (4, 3, 3, 3)
STATISTICS: tuple[Any, ...] = (torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, True)
# By name: arguments as schemas have them, all positional where they can be, and as few as there can be.
CALLS: dict[str, tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]] = {
    "linear.default": (((some(2, 3), some(4, 3), some(4)), {}), ((some(2, 3), some(4, 3)), {})),
    "gelu.default": (((some(5),), {}), ((some(5),), {"approximate": "tanh"})),
    "silu.default": (((some(5),), {}),),
    "scaled_dot_product_attention.default": (
        ((some(1, 2, 3, 4), some(1, 2, 3, 4), some(1, 2, 3, 4), some(3, 3), 0.0, False), {"scale": 0.5}),
        ((some(1, 2, 3, 4), some(1, 2, 3, 4), some(1, 2, 3, 4)), {}),
    ),
    **{
        name: (((some(3, 2), some(2)), {}), ((some(3), 2), {}), ((some(3).bfloat16(), some()), {}))
        for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
    },
    "neg.default": (((some(3),), {}),),
    "where.self": (((some(3) > 0, some(3), some(3)), {}),),
    "relu.default": (((some(3),), {}),),
    "mean.default": (((some(3),), {}), ((some(3),), {"dtype": torch.float64})),
    "mean.dim": (((some(2, 3), [-1], True), {}), ((some(2, 3), [0, 1]), {"dtype": torch.float64})),
    "matmul.default": (((some(2, 3, 4), some(4, 5)), {}),),
    "bmm.default": (((some(2, 3, 4), some(2, 4, 5)), {}),),
    "addmm.default": (((some(5), some(3, 4), some(4, 5)), {"beta": 2, "alpha": 0.5}),),
    "conv1d.default": (((some(2, 3, 6), some(4, 3, 3), some(4), [1], [1], [1], 1), {}),),
    "conv2d.default": (
        ((some(*IMAGES), some(*KERNELS), None, [2, 2], [1, 1]), {}),
        ((some(*IMAGES), some(*KERNELS)), {}),
    ),
    "embedding.default": (((some(5, 3), torch.tensor([0, 4]), 0, False, False), {}),),
    "layer_norm.default": (
        ((some(2, 3), [3], some(3), some(3), 1e-6, False), {}),
        ((some(2, 3), [3]), {}),
    ),
    "autocastfx::layer_norm.default": (
        ((some(2, 3).bfloat16(), [3], some(3), some(3), 1e-6, False), {}),
        ((some(2, 3), [3], some(3)), {"eps": 1e-6}),
        ((some(2, 3).half(), [3]), {}),
    ),
    "group_norm.default": (((some(2, 4, 3), 2, some(4), None, 1e-6, False), {}),),
    "batch_norm.default": (((some(*IMAGES), some(3), some(3), *STATISTICS), {}),),
    "softmax.int": (((some(2, 3), -1, torch.float32), {}), ((some(2, 3), 1), {})),
    "dropout.default": (((some(50), 0.5, True), {}), ((some(5), 0.0, True), {}), ((some(5), 0.5, False), {})),
    "transpose.int": (((some(2, 3), 0, -1), {}),),
    "permute.default": (((some(2, 3, 4), [2, 0, 1]), {}),),
    "unsqueeze.default": (((some(2, 3), -1), {}),),
    "reshape.default": (((some(2, 3), [3, -1]), {}), ((some(2, 3).t(), [6]), {})),
    "flatten.using_ints": (((some(2, 3, 4), 1), {}), ((some(2, 3, 4),), {})),
    "cat.default": ((([some(2, 3), some(1, 3)], 0), {}), (([some(2, 3)], -1), {})),
    "relu_.default": (((lambda: computed(3),), {}),),
    "to.dtype": (
        ((some(3), torch.bfloat16), {}),
        ((some(3), torch.float32, False, True), {"memory_format": torch.preserve_format}),
        ((some(3), torch.float32), {"copy": False}),
    ),
    "view.default": (((some(2, 3), [3, 2]), {}), ((some(2, 3), [-1]), {})),
    "expand.default": (((some(1, 3), [2, -1]), {}),),
    "contiguous.default": (((some(2, 3).t(),), {}), ((some(2, 3),), {"memory_format": torch.contiguous_format})),
    "add_.Tensor": (((lambda: computed(3), some(3)), {"alpha": 2}),),
}
CASTS = {
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float32: torch.Tensor.float,
    torch.float64: torch.Tensor.to,
}
NAMES = {f"{target._schema.name.removeprefix('aten::')}.{target._overloadname}": target for target in QUICK}


class Dispatched(TorchDispatchMode):
    """What runs below autograd: the overload, and all that is given to it but the tensors' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_map(_described, (args, kwargs or {}))
        self.calls.append((func, given))
        return func(*args, **(kwargs or {}))


def _described(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape), leaf.stride()) if isinstance(leaf, Tensor) else leaf


def history(tensor: Tensor) -> list[str]:
    """The nodes of autograd behind ``tensor``, nearest first."""
    found, queue = list[str](), [tensor.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is not None:
            found.append(node.name())
            queue += [reader for reader, _ in node.next_functions]
    return found


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = tuple(arg() if callable(arg) and not isinstance(arg, Tensor) else arg for arg in args)
    torch.manual_seed(0)
    with Dispatched() as dispatched:
        result = function(*args, **kwargs)
        leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor) and t.is_leaf]
        wanted = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(result.float().square().sum(), wanted, allow_unused=True) if wanted else ()
    return result, history(result), dispatched.calls, grads


@pytest.mark.parametrize("name", sorted(NAMES))
def test_it_does_what_the_overload_does(name: str) -> None:
    for args, kwargs in CALLS[name]:
        theirs, ours = (run(function, args, kwargs) for function in (NAMES[name], QUICK[NAMES[name]]))
        assert torch.equal(theirs[0], ours[0])
        assert theirs[1:3] == ours[1:3]
        for a, b in zip(theirs[3], ours[3], strict=True):
            assert a is b or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("source", [torch.float16, torch.float32])
def test_a_cast_is_the_method_of_its_dtype(source: torch.dtype, dtype: torch.dtype) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.to.dtype, (graph.placeholder("x"), dtype)))
    found = quick_graph(graph)
    (cast,) = found.find_nodes(op="call_function", target=CASTS[dtype])
    assert len(cast.args) == (2 if dtype == torch.float64 else 1)
    x = some(2, 3).to(source).detach().t().requires_grad_()
    theirs, ours = (run(fx.GraphModule(nn.Module(), each), (x,), {}) for each in (graph, found))
    assert torch.equal(theirs[0], ours[0])
    assert theirs[0].dtype == ours[0].dtype == dtype
    assert theirs[1:3] == ours[1:3]
    assert all(map(torch.equal, theirs[3], ours[3]))


COUNTED = {"first": 1, "second": 1, "twice": 2, "read": 1}


class Counting(nn.Module):
    """Batch norms, of which one is called twice and one has its count read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice, self.read = (nn.BatchNorm1d(4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(self.twice(self.twice(self.second(self.first(x)))))
        count = self.read.num_batches_tracked
        assert count is not None
        return x / count.float()


def test_batches_are_counted_at_once() -> None:
    original, x = Counting(), torch.randn(6, 4)
    amp_model = autocastfx.convert(copy.deepcopy(original), (x,), dtype=torch.bfloat16)
    found = quick_graph(amp_model.graph)
    (add,) = found.find_nodes(op="call_function", target=add_one)
    assert [node.name for node in add.args[0]] == ["first_num_batches_tracked", "second_num_batches_tracked"]
    assert len(found.find_nodes(op="call_function", target=Tensor.add_)) == 3
    for step in (1, 2):
        assert torch.equal(amp_model(x), original(x))
        counts = {name: int(held) for name, held in amp_model.named_buffers() if name.endswith("tracked")}
        assert counts == {f"{name}.num_batches_tracked": step * n for name, n in COUNTED.items()}


def test_a_counter_that_is_listed_twice_gets_two() -> None:
    one, two = torch.zeros((), dtype=torch.long), torch.ones((), dtype=torch.long)
    with Called() as called:
        add_one([one, two, one])
    assert (int(one), int(two)) == (2, 2)
    assert called.functions == [Tensor.add_] * 3, "on a GPU one kernel would write both results into one place"
    with Called() as called:
        add_one([one, two])
    assert called.functions == [torch._foreach_add_]  # pyright: ignore
    assert (int(one), int(two), one._version) == (3, 3, 3)
    stacked = torch.zeros(3, dtype=torch.long)
    torch.vmap(lambda count: add_one([count, count.clone()]) or count)(stacked)
    assert stacked.tolist() == [1, 1, 1]


class Nested(nn.Module):
    """Parameters at the root and below, one of them tied, a buffer, and one that is computed anew at each read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def test_the_quick_graph_is_given_what_the_graph_reads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("layers.0.weight")
    product = graph.call_function(torch.ops.aten.linear.default, (x, weight))
    graph.output((graph.call_function(torch.ops.aten.exp.default, (product,)),))
    before = str(graph)
    found = quick_graph(graph)
    assert str(graph) == before
    assert [(n.op, n.target) for n in found.nodes if n.op != "output"] == [
        ("placeholder", "x"),
        ("placeholder", weight.name),
        ("call_function", torch._C._nn.linear),
        ("call_function", torch.ops.aten.exp.default),
    ]


def test_what_python_does_not_take_so_stays_an_overload() -> None:
    graph, to, add = fx.Graph(), torch.ops.aten.to.dtype, torch.ops.aten.add.Tensor
    x = graph.placeholder("x")
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = [
        (to, (x, torch.float32, False, True), {}, torch.Tensor.to),
        (to, (x, torch.float32, False, True, torch.channels_last), {}, to),
        (add, (x, x), {"alpha": 2}, torch.add),
        (add, (x,), {"other": x}, add),
        (add, (), {"self": x, "other": x}, add),
    ]
    nodes = [graph.call_function(target, args, kwargs) for target, args, kwargs, _ in calls]
    graph.output(tuple(nodes))
    found = quick_graph(graph)
    assert [node.target for node in found.nodes][1:-1] == [expected for *_, expected in calls]


def test_what_is_computed_by_a_parametrization_is_followed() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    before = amp_model(x)
    first: Any = amp_model.get_submodule("0")
    nn.utils.parametrizations.weight_norm(first)
    assert torch.equal(amp_model(x), before)
    with torch.no_grad():
        first.parametrizations.weight.original0.mul_(2)
    assert not torch.equal(amp_model(x), before)


def test_a_model_runs_the_quick_graph_and_shows_the_overloads() -> None:
    amp_model = autocastfx.convert(Nested(), (torch.ones(2, 4),), dtype=torch.bfloat16)
    assert "torch.ops.aten.linear.default(" in amp_model.code
    with Called() as called:
        amp_model(torch.ones(2, 4))
    assert torch._C._nn.linear in called.functions
    assert torch.ops.aten.linear.default not in called.functions


class Called(TorchFunctionMode):
    """The functions that are called from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))
