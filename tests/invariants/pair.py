"""What a converted model keeps of the original: the list of the design, section 7, one test or more for each entry.

Every comparison is made against the same model in float32. The bound on a relative error is not chosen but counted: the
longest chain of 16-bit values in the graph, each of which adds one rounding, times the dtype's epsilon. Backward runs
through the chain a second time.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import AmpModule
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import dtypes, origin
from autocastfx.plan.plan import Precision
from autocastfx.runtime.operators.casts import saturating_cast
from benchmarks.judge import distance, gradient_distances
from tests.helpers import Net

LOW = [torch.float16, torch.bfloat16]


NEGATIVE = torch.finfo(torch.float32).min


def roundings(graph: fx.Graph, low: torch.dtype) -> int:
    """The longest chain of values of ``low`` in a graph, a sub-graph counted as if each of its nodes were one."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((depth[read] for read in node.all_input_nodes), default=0)
        inside = 0
        if node.op == "get_attr" and isinstance(held := _attribute(graph, str(node.target)), fx.GraphModule):
            inside = roundings(held.graph, low)
        depth[node] = before + inside + (low in dtypes(node))
    return max(depth.values())


def _attribute(graph: fx.Graph, target: str) -> Any:
    held = graph.owning_module
    for name in target.split("."):
        held = getattr(held, name, None)
    return held


def assert_close(what: str, result: Any, reference: Any, bound: float) -> None:
    if not isinstance(reference, Tensor):
        assert type(result) is type(reference), what
        assert result == reference, what
        return
    assert result.dtype == reference.dtype, what
    assert result.shape == reference.shape, what
    if reference.is_floating_point() or reference.is_complex():
        found = distance(result, reference)
        assert found <= bound, f"{what}: off by {found:.3g}, allowed {bound:.3g}\n{result}\n{reference}"
    else:
        assert torch.equal(result, reference), what


@dataclass
class Pair:
    """A converted model beside an untouched copy of the original, which holds no tensor in common with it."""

    original: nn.Module  # shares its tensors with ``amp_model``
    eager: nn.Module
    amp_model: AmpModule
    low: torch.dtype

    @classmethod
    def of(cls, model: nn.Module, call: Sequence[Any], low: torch.dtype, **options: Any) -> Pair:
        eager = copy.deepcopy(model)
        args, kwargs = _fresh(call)
        return cls(model, eager, autocastfx.convert(model, args, kwargs, dtype=low, **options), low)

    def train(self, mode: bool) -> Pair:
        self.eager.train(mode)
        self.amp_model.train(mode)
        return self

    def bound(self, call: Sequence[Any]) -> float:
        variant = self.amp_model._variant_for(*_split(call))
        assert variant is not None
        chain = fx.GraphModule(self.amp_model, variant.graph).graph  # with an owner, to look sub-graphs up
        return max(1, roundings(chain, self.low)) * torch.finfo(self.low).eps

    def agree(self, *call: Any, backward: bool = True, seed: int = 0) -> tuple[Any, Any]:
        """Run both on copies of ``call``; compare outputs, arguments, buffers and gradients. Gives both outputs."""
        (mine, mine_named), (theirs, theirs_named) = _fresh(call), _fresh(call)
        torch.manual_seed(seed)
        expected = self.eager(*theirs, **theirs_named)
        torch.manual_seed(seed)
        found = self.amp_model(*mine, **mine_named)
        bound = self.bound(call)
        found_leaves, found_spec = pytree.tree_flatten(found)
        expected_leaves, expected_spec = pytree.tree_flatten(expected)
        assert found_spec == expected_spec
        for i, (a, b) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
            assert_close(f"output {i}", a, b, bound)
            assert getattr(a, "requires_grad", None) == getattr(b, "requires_grad", None), f"output {i} requires grad"
        given = pytree.tree_leaves((mine, mine_named)), pytree.tree_leaves((theirs, theirs_named))
        for i, (a, b) in enumerate(zip(*given, strict=True)):
            assert_close(f"argument {i}", a, b, bound)
        for (name, b), a in zip(self.eager.named_buffers(), self.original.buffers(), strict=True):
            assert_close(f"buffer {name}", a, b, bound)
        if backward:
            self._gradients_agree(found_leaves, expected_leaves, 2 * bound)
        return found, expected

    def _gradients_agree(self, found: list[Any], expected: list[Any], bound: float) -> None:
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if isinstance(b, Tensor) and b.requires_grad]
        if not pairs:
            return
        self.eager.zero_grad()
        self.original.zero_grad()
        weights = [torch.randn_like(b) for _, b in pairs]
        torch.autograd.backward([a for a, _ in pairs], weights)
        torch.autograd.backward([b for _, b in pairs], weights)
        grads: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for (name, b), a in zip(self.eager.named_parameters(), self.original.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None and b.grad is not None:
                assert a.grad.dtype == a.dtype, name
                assert a.grad.isfinite().all(), name
                grads[0][name], grads[1][name] = a.grad, b.grad
        for name, error in gradient_distances(*grads).items():
            assert error <= bound, f"gradient of {name}: off by {error:.3g}, allowed {bound:.3g}"


def _split(call: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as written in this file: positional arguments, and keyword arguments in a last ``Named``."""
    if call and isinstance(call[-1], Named):
        return tuple(call[:-1]), dict(call[-1])
    return tuple(call), {}


def _fresh(call: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, _split(call))


class Named(dict[str, Any]):
    """The keyword arguments of a call."""


def net(function: Callable[..., Any], **held: Any) -> Net:
    """``Net`` with two linear layers, ``a`` and ``b``, of eight features: fewer to add up are no product."""
    return Net(function, **{"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), **held})


def inserted_casts(amp_model: AmpModule) -> list[fx.Node]:
    casts = ("to", of_function(saturating_cast))
    return [node for node in amp_model.graph.nodes if origin(node) is not None and op_name(node) in casts]


def placed(amp_model: AmpModule, op: str) -> list[Precision]:
    return [node.placement.run for node in amp_model.plan.nodes if node.op == op]


@dataclass
class Record:
    values: Tensor
    note: Any = None


pytree.register_dataclass(Record)


def snapshot(model: nn.Module) -> list[Any]:
    """All that a conversion could change in a model: attributes by identity, containers and tensors by content too."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        found.append((name, type(module), module.training, type(module).forward))
        for key, value in module.__dict__.items():
            content: Any = None
            if isinstance(value, dict):
                content = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, (list, set)):
                content = [id(v) for v in value]
            found.append((name, key, id(value), content))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.append((name, id(tensor), tensor._version, tensor.dtype, tensor.requires_grad, id(tensor.grad)))
        found.append(tensor.detach().clone().view(torch.uint8 if tensor.ndim else tensor.dtype).tolist())
    return found


def settings_now() -> list[Any]:
    """torch's settings that a capture touches."""
    return [
        hash(torch.get_rng_state().numpy().tobytes()),
        hash(random.getstate()),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.autograd.Function.__dict__.get("apply"),
        torch.utils.checkpoint.checkpoint,
        torch.fx.experimental._config.backed_size_oblivious,
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    ]


class Busy(nn.Module):
    """A forward that changes whatever it can reach: attributes, containers, buffers, random numbers, modes."""

    def __init__(self, fail: str = "") -> None:
        super().__init__()
        self.fail = fail
        self.a, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.bn.eval()
        self.log: list[Any] = [1]
        self.cache: dict[str, Any] = {"k": [1]}
        self.seen: set[Any] = {1}
        self.count = 0
        self.last: Any = None
        self.plain = torch.zeros(8)
        self.register_buffer("average", torch.zeros(8))
        self.register_forward_hook(lambda module, args, output: module.log.append("hook") or None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = y = self.drop(self.bn(self.a(x)))
        self.log.append(y)
        self.cache["k"].append(y)
        self.cache["new"] = y
        self.seen.add("seen")
        self.training = not self.training
        self.average.add_(y.detach().mean(0))
        self.average = self.average * 2
        if self.fail == "raise":
            raise RuntimeError("on purpose")
        if self.fail == "branch" and y.sum() > 0:
            return y
        if self.fail == "op":
            y = torch.cumprod(y, 0)
        return self.frozen(y) + torch.randn(8)


class Features(nn.Module):
    """Convolution, batch norm, an in-place activation, dropout and a further in-place op."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.relu, self.drop, self.fc = nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.fc(self.drop(pooled).add_(1.0))


@torch.library.custom_op("invariants::bump", mutates_args=("x",))
def bump(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return y * 2


@bump.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


class Tied(nn.Module):
    """Embedding and head share a weight, a layer is called twice, two layers share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.bias = self.layer.bias
        self.again = self.layer

    def forward(self, i: Tensor) -> Tensor:
        x = self.embed(i)
        return self.head(self.other(torch.tanh(self.again(torch.tanh(self.layer(x))))))


@torch.library.custom_op("invariants::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad + grad)


HUGE = -3.4e38  # beyond bfloat16's largest number too


def attention(forms: Mapping[str, Callable[..., Tensor]], **held: Any) -> Net:
    """Attention under one mask, written in several ways: one graph, an output for each."""

    def run(m: Net, x: Tensor, *mask: Tensor) -> dict[str, Tensor]:
        (given,) = mask or (m.mask,)
        return {name: form(m, x, given) for name, form in forms.items()}

    return Net(run, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8), **held)
