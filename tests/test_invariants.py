"""What a converted model keeps of the original: the list of the design, section 7, one test or more for each entry.

Every comparison is made against the same model in float32. The bound on a relative error is not chosen but counted: the
longest chain of 16-bit values in the graph, each of which adds one rounding, times the dtype's epsilon. Backward runs
through the chain a second time.
"""

from __future__ import annotations

import copy
import math
import os
import random
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import AmpModule, Precision
from autocastfx.graph import dtypes, origin
from autocastfx.op_list import preset_folder
from autocastfx.op_name import op_name

LOW = [torch.float16, torch.bfloat16]
NEGATIVE = torch.finfo(torch.float32).min

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


# -- how a converted model is compared with the original --------------------------------------------------------------


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


def distance(result: Tensor, reference: Tensor) -> float:
    """Relative distance in the 2-norm; infinite unless the infinities and the NaNs are those of ``reference``."""
    kind = torch.complex128 if reference.is_complex() else torch.float64
    result, reference = result.detach().to(kind), reference.detach().to(kind)
    finite = reference.isfinite()
    if not torch.equal(finite, result.isfinite()):
        return math.inf
    others = (result == reference) | (result.isnan() & reference.isnan())
    if not bool(others[~finite].all()):
        return math.inf
    norm = float(reference[finite].norm())
    gap = float((result - reference)[finite].norm())
    return gap / norm if norm else gap


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
        variant = self.amp_model._fitting(self.amp_model._signature.bind(*_split(call)))
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
        grads: list[tuple[Tensor, Tensor]] = []
        for (name, b), a in zip(self.eager.named_parameters(), self.original.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None and b.grad is not None:
                assert a.grad.dtype == a.dtype, name
                assert a.grad.isfinite().all(), name
                grads.append((a.grad, b.grad))
        # One vector: the true gradient of some parameters is zero (a bias before a batch norm).
        joined = [torch.cat([pair[i].flatten() for pair in grads]) for i in (0, 1)]
        found_error = distance(*joined)
        assert found_error <= bound, f"gradients: off by {found_error:.3g}, allowed {bound:.3g}"


def _split(call: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as written in this file: positional arguments, and keyword arguments in a last ``Named``."""
    if call and isinstance(call[-1], Named):
        return tuple(call[:-1]), dict(call[-1])
    return tuple(call), {}


def _fresh(call: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, _split(call))


class Named(dict[str, Any]):
    """The keyword arguments of a call."""


class Net(nn.Module):
    """A function of (itself, inputs) as a model, with the modules, parameters and buffers that it uses."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def net(function: Callable[..., Any], **held: Any) -> Net:
    """``Net`` with two linear layers, ``a`` and ``b``, of four features."""
    return Net(function, **{"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), **held})


def inserted_casts(amp_model: AmpModule) -> list[fx.Node]:
    return [node for node in amp_model.graph.nodes if origin(node) is not None and op_name(node) == "to"]


def placed(amp_model: AmpModule, op: str) -> list[Precision]:
    return [node.placement.run for node in amp_model.plan.nodes if node.op == op and not node.removed]


# -- outputs, inputs and buffers keep value semantics and dtype -------------------------------------------------------

Named2 = namedtuple("Named2", "first second")


@dataclass
class Record:
    values: Tensor
    note: Any = None


torch.export.register_dataclass(Record, serialized_type_name="autocastfx.tests.Record")


def _dict(m: Net, x: Tensor) -> Any:
    return OrderedDict(low=m.a(x), none=None, number=3, word="w", size=x.shape[0], nested=[(m.b(x),), {"k": x.sum()}])


OUTPUTS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "tuple": lambda m, x: (m.a(x), m.b(x).argmax(-1)),
    "list": lambda m, x: [m.a(x), x > 0],
    "namedtuple": lambda m, x: Named2(m.a(x), x.long()),
    "dataclass": lambda m, x: Record(m.a(x)),
    "0-d": lambda m, x: m.a(x).mean(),
    "same value twice": lambda m, x: (lambda y: (y, y, y[0]))(m.a(x)),
    "an input": lambda m, x: (x, m.a(x), x),
    "a parameter": lambda m, x: (m.a(x), m.a.weight, m.a.bias),
    "a constant": lambda m, x: (m.a(x), torch.tensor([1.0, 2.0]), torch.tensor(3)),
    "double": lambda m, x: (m.a(x).double(), m.a(x).half()),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_structure_and_dtype(name: str, low: torch.dtype) -> None:
    x = torch.randn(3, 4)
    pair = Pair.of(net(OUTPUTS[name]), (x,), low)
    pair.agree(x)
    if name == "same value twice":
        first, second, _ = pair.amp_model(x)
        assert first is second


def test_an_output_that_is_an_input_or_a_parameter_is_that_tensor() -> None:
    x = torch.randn(3, 4)
    model = net(lambda m, x: (m.a(x), x, m.a.weight, m.state), state=torch.ones(2))
    _, given, weight, state = autocastfx.convert(model, (x,))(x)
    assert given is x
    assert weight is model.a.weight
    assert state is model.state


@pytest.mark.parametrize("low", LOW)
def test_an_output_is_not_changed_by_a_later_call(low: torch.dtype) -> None:
    x = torch.randn(3, 4)
    amp_model = autocastfx.convert(net(lambda m, x: m.b(m.a(x).relu_())), (x,), dtype=low)
    first = amp_model(x)
    before = first.clone()
    amp_model(torch.randn(3, 4))
    assert torch.equal(first, before)


def test_inputs_keep_their_values() -> None:
    x, mask = torch.randn(3, 4), torch.full((3, 4), NEGATIVE)
    given = (x.clone(), mask.clone())
    amp_model = autocastfx.convert(net(lambda m, x, mask: m.b((m.a(x) + mask).softmax(-1))), given)
    amp_model(*given)
    assert torch.equal(given[0], x)
    assert torch.equal(given[1], mask)
    assert given[0]._version == 0


@pytest.mark.parametrize("low", LOW)
def test_a_view_of_an_input_that_is_returned_stays_a_view(low: torch.dtype) -> None:
    x = torch.randn(3, 4)
    amp_model = autocastfx.convert(net(lambda m, x: (m.a(x), x[:, :2], x.t())), (x,), dtype=low)
    _, part, turned = amp_model(x)
    assert part.data_ptr() == turned.data_ptr() == x.data_ptr()


# -- state_dict keys identical ----------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Tied weights, a module under two names, buffers of all kinds, names that are no Python names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("early", torch.ones(4))
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.again = self.layers[0]
        self.table = nn.ModuleDict({"a-b": nn.Linear(4, 4), "0": nn.Linear(4, 4, bias=False)})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("empty", None)
        self.register_parameter("absent", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.lone = nn.Parameter(torch.ones(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, i: Tensor) -> Tensor:
        self.steps.add_(1)
        x = self.embed(i) * self.early * self.scratch
        for layer in self.layers:
            x = layer(x)
        return self.head(self.table["a-b"](self.again(x)) + self.table["0"](x) * self.lone)


def test_state_dict_has_the_same_keys_in_the_same_order_with_the_same_tensors() -> None:
    model = Stateful()
    # A constant that the graph holds must not show.
    amp_model = autocastfx.convert(nn.Sequential(OrderedDict(inner=model)), (torch.tensor([1, 2, 3]),))
    amp_model(torch.tensor([1, 2, 3, 4]))
    mine, theirs = amp_model.state_dict(), {f"inner.{k}": v for k, v in model.state_dict().items()}
    assert list(mine) == list(theirs)
    assert all(mine[k].data_ptr() == theirs[k].data_ptr() and mine[k].dtype == theirs[k].dtype for k in mine)
    expected = [f"inner.{n}" for n, _ in model.named_parameters()]
    assert [n for n, _ in amp_model.named_parameters()] == expected
    mine_all = dict(amp_model.named_parameters(remove_duplicate=False))
    assert list(mine_all) == [f"inner.{n}" for n, _ in model.named_parameters(remove_duplicate=False)]
    assert [n for n, _ in amp_model.named_buffers()] == [f"inner.{n}" for n, _ in model.named_buffers()]


def test_state_dict_does_not_show_constants_of_the_graph() -> None:
    model = net(lambda m, x: m.a(x) * torch.tensor([1.0, 2.0, 3.0, 1e6]))
    amp_model = autocastfx.convert(model, (torch.randn(3, 4),))
    assert any("lifted" in name for name, _ in amp_model.named_buffers()), "no constant: the test tests nothing"
    assert list(amp_model.state_dict()) == list(model.state_dict())


def test_state_dict_hooks_and_extra_state_are_kept() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 2}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    model = nn.Sequential(Extra(4, 4))
    amp_model = autocastfx.convert(model, (torch.randn(3, 4),))
    assert list(amp_model.state_dict()) == list(model.state_dict())


def test_state_dicts_are_interchangeable() -> None:
    i = torch.tensor([1, 2, 3])
    model = Stateful()
    amp_model = autocastfx.convert(model, (i,))
    other = Stateful()
    assert other.load_state_dict(amp_model.state_dict()) == nn.Module().load_state_dict({})
    amp_model.load_state_dict(Stateful().state_dict())
    assert not torch.equal(model.head.weight, other.head.weight), "the caller's model is loaded too"
    other.load_state_dict(amp_model.state_dict())
    assert torch.equal(model.head.weight, other.head.weight)


# -- the caller's module, lists and settings unmodified ---------------------------------------------------------------


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
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.autograd.Function.__dict__.get("apply"),
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.fx.experimental._config.backed_size_oblivious,
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    ]


class Busy(nn.Module):
    """A forward that changes whatever it can reach: attributes, containers, buffers, random numbers, modes."""

    def __init__(self, fail: str = "") -> None:
        super().__init__()
        self.fail = fail
        self.a, self.bn, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.bn.eval()
        self.log: list[Any] = [1]
        self.cache: dict[str, Any] = {"k": [1]}
        self.seen = {1}
        self.count = 0
        self.last: Any = None
        self.plain = torch.zeros(4)
        self.register_buffer("average", torch.zeros(4))
        self.register_forward_hook(lambda module, args, output: module.log.append("hook") or None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = y = self.drop(self.bn(self.a(x)))
        self.log.append(y)
        self.cache["k"].append(y)
        self.cache["new"] = y
        self.seen.add(self.count)
        self.training = not self.training
        self.average.add_(y.detach().mean(0))
        self.average = self.average * 2
        random.random()
        if self.fail == "raise":
            raise RuntimeError("on purpose")
        if self.fail == "branch" and y.sum() > 0:
            return y
        if self.fail == "op":
            y = torch.cumprod(y, 0)
        return self.frozen(y) + torch.randn(4)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("low", LOW)
def test_the_callers_module_and_settings_are_unmodified(low: torch.dtype, context: str) -> None:
    model, x = Busy(), torch.randn(3, 4)
    model.a.weight.grad = torch.ones(4, 4)
    with CONTEXTS[context]():
        before, now = snapshot(model), settings_now()
        autocastfx.convert(model, (x,), dtype=low)
        assert settings_now() == now
    assert snapshot(model) == before
    assert x._version == 0
    assert x.grad is None
    assert not x.requires_grad


def test_a_further_capture_leaves_the_callers_module_unmodified() -> None:
    model = Busy()
    amp_model = autocastfx.convert(model, (torch.randn(3, 4),))
    amp_model.average.zero_()
    attributes = [(name, key, id(value)) for name, m in model.named_modules() for key, value in m.__dict__.items()]
    now = settings_now()
    captured = len(amp_model.variants)
    amp_model.capture(amp_model._signature.bind((torch.randn(2, 3, 4)[0],), {}), (False,) * 5)
    assert len(amp_model.variants) == captured + 1
    assert settings_now() == now
    assert attributes == [(n, k, id(v)) for n, m in model.named_modules() for k, v in m.__dict__.items()]


def test_a_default_dtype_is_left_and_has_no_say() -> None:
    model, x = net(lambda m, x: m.b(m.a(x).tanh())), torch.randn(3, 4)
    usual = autocastfx.convert(model, (x,))
    torch.set_default_dtype(torch.float64)
    try:
        other = autocastfx.convert(model, (x,))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert other.code == usual.code


def test_lists_and_examples_are_unmodified(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("deny: [linear]\n")
    lists: list[Any] = ["default", path, autocastfx.load_op_list("bfloat16")]
    kept_lists, kept_rules, text = list(lists), dict(lists[2].rules), path.read_text()
    kwargs = {"scale": 2.0, "more": {"z": torch.ones(4)}}
    inner = kwargs["more"]
    model = net(lambda m, x, scale, more: m.a(x) * scale + more["z"])
    autocastfx.convert(model, (torch.randn(3, 4),), kwargs, op_list=lists)
    assert lists == kept_lists
    assert dict(lists[2].rules) == kept_rules
    assert path.read_text() == text
    assert list(kwargs) == ["scale", "more"]
    assert kwargs["more"] is inner
    assert torch.equal(kwargs["more"]["z"], torch.ones(4))


def test_the_original_still_runs_in_float32() -> None:
    model, x = net(lambda m, x: m.b(m.a(x).tanh())), torch.randn(3, 4)
    expected = model(x)
    amp_model = autocastfx.convert(model, (x,))
    amp_model.half_written = True  # attributes are the converted model's own
    assert torch.equal(model(x), expected)
    assert not hasattr(model, "half_written")


# -- the caller's module intact after any error -----------------------------------------------------------------------


def _ban(tmp_path: Path) -> Path:
    path = tmp_path / "ban.yaml"
    path.write_text("ban: [cumprod]\n")
    return path


FAILURES: dict[str, tuple[str, type[Exception], Callable[[Path], dict[str, Any]]]] = {
    "the model raises": ("raise", autocastfx.CaptureError, lambda _: {}),
    "data-dependent branch": ("branch", autocastfx.CaptureError, lambda _: {}),
    "wrong number of inputs": ("", autocastfx.CaptureError, lambda _: {"example_inputs": ()}),
    "wrong size of input": ("", autocastfx.CaptureError, lambda _: {"example_inputs": (torch.randn(3, 5),)}),
    "no inputs": ("", autocastfx.UnsupportedError, lambda _: {"example_inputs": None}),
    "banned op": ("op", autocastfx.BannedOpError, lambda folder: {"op_list": ["default", _ban(folder)]}),
    "missing list": ("", autocastfx.OpListError, lambda _: {"op_list": "nowhere.yaml"}),
    "reserved": ("", autocastfx.UnsupportedError, lambda _: {"weights": "cached"}),
    "dtype": ("", ValueError, lambda _: {"dtype": torch.float64}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_callers_module_is_intact_after_an_error(name: str, tmp_path: Path) -> None:
    fail, error, options = FAILURES[name]
    model = Busy(fail)
    before, now = snapshot(model), settings_now()
    with pytest.raises(error):
        autocastfx.convert(model, **{"example_inputs": (torch.randn(3, 4),), **options(tmp_path)})
    assert snapshot(model) == before
    assert settings_now() == now


def test_a_model_that_failed_converts_once_the_cause_is_gone() -> None:
    x = torch.randn(3, 4)
    model = Busy("raise")
    with pytest.raises(autocastfx.CaptureError, match="on purpose"):
        autocastfx.convert(model, (x,))
    model.fail = ""
    assert autocastfx.convert(model, (x,))(x).shape == (3, 4)


# -- mutated inputs and buffers really updated, in float32 ------------------------------------------------------------


class Features(nn.Module):
    """Convolution, batch norm, an in-place activation, dropout and a further in-place op."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.relu, self.drop, self.fc = nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.fc(self.drop(pooled).add_(1.0))


def _ema(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        m.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        m.steps += 1
    return m.b(y - m.average)


def _ema_copied(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    new = m.average * 0.9 + y.mean(0) * 0.1
    m.average.copy_(new.detach())
    return m.b(y - new)


def _ema_assigned(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    m.average = m.average * 0.9 + y.detach().mean(0) * 0.1
    return m.b(y - m.average)


def _input_added(m: Net, x: Tensor) -> Tensor:
    x.add_(1.0)
    return m.b(m.a(x))


def _input_view(m: Net, x: Tensor) -> Tensor:
    x[:, 1:3].mul_(2.0)
    x.t()[0].zero_()
    return m.b(m.a(x))


def _input_gets_result(m: Net, x: Tensor) -> Tensor:
    y = m.a(x).detach()
    x.copy_(y.tanh())
    return m.b(y)


def _in_place_on_views(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 1:3].mul_(2.0)
    y.view(-1)[0] = 5.0
    y.t()[2].add_(x.t()[1])
    return m.b(y)


def _index_assignment(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.a(x)
    y[torch.tensor([0, 2])] = 0.5
    y[:, 0] = x[:, 1]
    y[x > 1] = 0.0
    return m.b(y), y


def _relu_after_linear(m: Net, x: Tensor) -> Tensor:
    return m.b(F.relu_(m.a(x)))


def _dropout_in_place(m: Net, x: Tensor) -> Tensor:
    y = F.dropout(m.a(x), 0.5, m.training, inplace=True)
    y += x
    return m.b(y)


def _assembled(m: Net, x: Tensor) -> Tensor:
    rows = torch.empty(x.shape[0], 8)
    rows[:, :4] = m.a(x)
    rows[:, 4:] = x
    out = torch.zeros(5, 8).index_add_(0, torch.arange(3), rows)
    return m.b(out.unflatten(1, (2, 4)))


def _cache(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.cache[: x.shape[0]] = m.a(x)
    return m.b(m.cache.clone())


def _augmented(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    y *= 2
    y -= x
    y /= 3
    z = y
    z += 1
    return m.b(y)


MUTATIONS: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "EMA under no_grad": (_ema, {"average": torch.ones(4), "steps": torch.zeros((), dtype=torch.long)}),
    "EMA copied": (_ema_copied, {"average": torch.ones(4)}),
    "EMA assigned": (_ema_assigned, {"average": torch.ones(4)}),
    "x.add_ on an input": (_input_added, {}),
    "view of an input": (_input_view, {}),
    "copy_ into an input": (_input_gets_result, {}),
    "in place on views": (_in_place_on_views, {}),
    "index assignment": (_index_assignment, {}),
    "relu_ after linear": (_relu_after_linear, {}),
    "dropout, then in place": (_dropout_in_place, {}),
    "assembled": (_assembled, {}),
    "rows of a buffer": (_cache, {"cache": torch.zeros(6, 4)}),
    "augmented assignments": (_augmented, {}),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_mutated_is_updated(name: str, low: torch.dtype) -> None:
    function, buffers = MUTATIONS[name]
    x = torch.randn(3, 4)
    pair = Pair.of(net(function, **copy.deepcopy(buffers)), (x,), low)
    for mode in (True, False):
        for _ in range(2):  # the second call starts from the first one's buffers
            pair.train(mode).agree(torch.randn(3, 4))


@pytest.mark.parametrize("low", LOW)
def test_batch_norm_statistics_are_updated_in_training_only(low: torch.dtype) -> None:
    pair = Pair.of(Features(), (torch.randn(2, 3, 5, 5),), low)
    for _ in range(3):
        pair.train(True).agree(torch.randn(4, 3, 5, 5))
    assert pair.original.bn.num_batches_tracked == 3
    assert pair.original.bn.running_mean.dtype == torch.float32
    kept = pair.original.bn.running_mean.clone()
    pair.train(False).agree(torch.randn(4, 3, 5, 5))
    assert torch.equal(pair.original.bn.running_mean, kept)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("function", [_ema, _ema_copied, _ema_assigned])
def test_buffers_are_updated_in_float32(function: Callable[..., Any], low: torch.dtype) -> None:
    """A step of a tenth of the low epsilon, which a 16-bit buffer, or a 16-bit update of it, would round away."""
    buffers = {"average": torch.ones(4), "steps": torch.zeros((), dtype=torch.long)}
    model = net(function, **buffers)
    x = torch.randn(3, 4)
    with torch.no_grad():  # so that a(x) is 1 - eps: the average moves by a tenth of eps
        model.a.weight.zero_()
        model.a.bias.fill_(1 - torch.finfo(low).eps)
    amp_model = autocastfx.convert(model, (x,), dtype=low)
    expected = model.average * 0.9 + model.a.bias.detach() * 0.1
    amp_model(x)
    step = 0.1 * torch.finfo(low).eps
    assert (model.average - expected).abs().max() < step / 10


@pytest.mark.parametrize("low", LOW)
def test_an_input_written_to_is_written_in_float32(low: torch.dtype) -> None:
    x = torch.ones(3, 4)
    step = torch.finfo(low).eps / 8
    model = net(lambda m, x: m.b(m.a(x.add_(step))))
    amp_model = autocastfx.convert(model, (x.clone(),), dtype=low)
    amp_model(x)
    assert torch.equal(x, torch.ones(3, 4) + step)


@torch.library.custom_op("invariants::inc_", mutates_args=("x",))
def inc_(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("invariants::bump", mutates_args=("x",))
def bump(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return y * 2


@bump.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


def _custom(m: Net, x: Tensor) -> Tensor:
    y = m.a(x) + 0
    inc_(y)
    return m.b(y)


def _custom_with_result(m: Net, x: Tensor) -> Tensor:
    y = m.a(x) + 0
    z = bump(y, x)
    return m.b(y + z)


def _foreach(m: Net, x: Tensor) -> Tensor:
    y = m.a(x) + 0
    torch._foreach_add_([y], 1.0)
    return m.b(y)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("function", [_custom, _custom_with_result, _foreach])
def test_a_write_by_an_op_that_does_not_return_its_argument_is_seen(
    function: Callable[..., Any], low: torch.dtype
) -> None:
    x = torch.randn(3, 4)
    pair = Pair.of(net(function), (x,), low)
    with torch.no_grad():
        pair.agree(x, backward=False)


def _lose(amp_model: AmpModule, op: str, *, without: Callable[[fx.Graph, fx.Node], fx.Node | None]) -> None:
    """Replace the nodes of ``op`` in the shown graph, and compile it anew."""
    nodes = [n for n in amp_model.graph.nodes if op_name(n) == op]
    assert nodes, f"no {op}: nothing would be lost"
    for node in nodes:
        with amp_model.graph.inserting_before(node):
            instead = without(amp_model.graph, node)
        if instead is not None:
            node.replace_all_uses_with(instead)
            amp_model.graph.erase_node(node)
    amp_model.recompile()


@pytest.mark.parametrize("low", LOW)
def test_a_planted_lost_batch_norm_update_is_caught(low: torch.dtype) -> None:
    def on_copies(graph: fx.Graph, node: fx.Node) -> None:
        statistics = [graph.call_function(torch.ops.aten.clone.default, (a,)) for a in node.args[3:5]]
        node.args = (*node.args[:3], *statistics, *node.args[5:])

    pair = Pair.of(Features(), (torch.randn(2, 3, 5, 5),), low)
    _lose(pair.amp_model, "batch_norm", without=on_copies)
    with pytest.raises(AssertionError, match=r"buffer bn\.running_mean"):
        pair.agree(torch.randn(4, 3, 5, 5))


def test_a_planted_lost_count_is_caught() -> None:
    pair = Pair.of(Features(), (torch.randn(2, 3, 5, 5),), torch.bfloat16)
    counts = [n for n in pair.amp_model.graph.nodes if op_name(n) == "add_" and dtypes(n) == (torch.int64,)]
    assert counts
    for node in counts:
        pair.amp_model.graph.erase_node(node)
    pair.amp_model.recompile()
    with pytest.raises(AssertionError, match=r"buffer bn\.num_batches_tracked"):
        pair.agree(torch.randn(4, 3, 5, 5))


@pytest.mark.parametrize(
    ("name", "op", "out_of_place", "message"),
    [
        ("x.add_ on an input", "add_", torch.ops.aten.add.Tensor, "argument 0"),
        ("EMA under no_grad", "mul_", torch.ops.aten.mul.Tensor, "buffer average"),
        ("EMA copied", "copy_", torch.ops.aten.copy.default, "buffer average"),
        ("in place on views", "mul_", torch.ops.aten.mul.Tensor, "output 0"),
    ],
)
def test_a_planted_lost_in_place_update_is_caught(name: str, op: str, out_of_place: Any, message: str) -> None:
    def functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return graph.call_function(out_of_place, node.args, node.kwargs)

    function, buffers = MUTATIONS[name]
    model = net(function, **copy.deepcopy(buffers))
    x = torch.randn(3, 4)
    pair = Pair.of(model, (x,), torch.bfloat16)
    if any(op_name(n) == op for n in pair.amp_model.graph.nodes):
        _lose(pair.amp_model, op, without=functional)
    else:  # in the sub-graph of torch.no_grad
        (inner,) = [m for m in pair.amp_model.variants[0].modules() if isinstance(m, fx.GraphModule)]
        for node in [n for n in inner.graph.nodes if op_name(n) == op]:
            with inner.graph.inserting_before(node):
                node.replace_all_uses_with(functional(inner.graph, node))
            inner.graph.erase_node(node)
        inner.recompile()
    with pytest.raises(AssertionError, match=message):
        pair.agree(x)


# -- same seed, same dropout mask -------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[..., Any]] = {
    "dropout": lambda m, x: F.dropout(m.a(x), 0.5, m.training),
    "dropout between": lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.training)),
    "feature dropout": lambda m, x: F.dropout2d(m.a(x)[None, :, :, None], 0.5, m.training),
    "alpha dropout": lambda m, x: F.alpha_dropout(m.a(x), 0.5, m.training),
    "two": lambda m, x: F.dropout(m.b(F.dropout(m.a(x), 0.2, m.training)), 0.7, m.training),
    "after noise": lambda m, x: F.dropout(m.a(x) + torch.randn(4) * torch.rand_like(x), 0.5, m.training),
    "attention": lambda m, x: F.scaled_dot_product_attention(*m.a(x)[None].expand(3, -1, -1, -1), dropout_p=0.5),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", RANDOM)
def test_the_same_seed_gives_the_same_dropout_mask(name: str, low: torch.dtype) -> None:
    x = torch.randn(16, 4)
    pair = Pair.of(net(RANDOM[name]), (x,), low)
    for seed in (0, 1):
        found, expected = pair.agree(x, seed=seed)
        assert torch.equal(found == 0, expected == 0)
    assert not torch.equal(pair.amp_model(x), found), "another state of the generator gives another mask"


def test_the_same_seed_gives_the_same_mask_inside_an_lstm() -> None:
    x = torch.randn(2, 5, 4)
    model = Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True))
    Pair.of(model, (x,), torch.float16).agree(x)


# -- weight tying kept ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and head share a weight, a layer is called twice, two layers share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.bias = self.layer.bias
        self.again = self.layer

    def forward(self, i: Tensor) -> Tensor:
        x = self.embed(i)
        return self.head(self.other(torch.tanh(self.again(torch.tanh(self.layer(x))))))


@pytest.mark.parametrize("low", LOW)
def test_weight_tying_is_kept(low: torch.dtype) -> None:
    i = torch.tensor([[1, 2], [0, 3]])
    pair = Pair.of(Tied(), (i,), low)
    pair.agree(i)
    amp_model: Any = pair.amp_model
    assert amp_model.head.weight is amp_model.embed.weight is pair.original.embed.weight
    assert amp_model.other.bias is amp_model.layer.bias
    assert amp_model.again is amp_model.layer
    assert len(list(amp_model.parameters())) == len(list(pair.original.parameters()))


@pytest.mark.parametrize("low", LOW)
def test_gradients_accumulate_in_tied_weights_and_over_calls(low: torch.dtype) -> None:
    i = torch.tensor([[1, 2], [0, 3]])
    model = Tied()
    amp_model = autocastfx.convert(model, (i,), dtype=low)
    amp_model(i).sum().backward()
    once = model.embed.weight.grad.clone()
    amp_model(i).sum().backward()
    assert torch.equal(model.embed.weight.grad, 2 * once)
    assert (once[4:] != 0).any(), "rows that only the head reads"


@pytest.mark.parametrize("low", LOW)
def test_a_tied_weight_is_cast_once(low: torch.dtype) -> None:
    amp_model = autocastfx.convert(Tied(), (torch.tensor([[1, 2], [0, 3]]),), dtype=low)
    reads = Counter(cast.all_input_nodes[0].target for cast in inserted_casts(amp_model))
    assert reads["layer.weight"] == 1
    shared = [t for t in reads if t in ("layer.bias", "other.bias")]
    assert sum(reads[t] for t in shared) == 1


# -- None, kwargs, nested and 0-d arguments ---------------------------------------------------------------------------


class Flexible(nn.Module):
    """All kinds of parameters that a forward can have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        *rest: Tensor,
        scale: Any = None,
        flag: bool = True,
        config: Mapping[str, Any] | None = None,
        **named: Tensor,
    ) -> Tensor:
        y = self.a(x)
        for other in rest:
            y = y + other
        if scale is not None:
            y = y * scale
        if flag:
            y = torch.tanh(y)
        if config:
            y = y + config["items"][0]
        for key in sorted(named):
            y = y - named[key]
        return self.b(y)


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, /, mask: Tensor | None = None, *, k: float = 1) -> Tensor:
        y = self.a(x) * k
        return y if mask is None else y.masked_fill(mask, 0.0)


@pytest.mark.parametrize("low", LOW)
def test_call_structures_of_all_kinds(low: torch.dtype) -> None:
    x, v = torch.randn(3, 4), torch.randn(4)
    pair = Pair.of(Flexible(), (x,), low)
    calls: list[tuple[Any, ...]] = [
        (x,),
        (Named(x=x),),
        (x, v),
        (x, v, x),
        (x, v, Named(flag=False)),
        (x, Named(scale=2.0)),
        (x, Named(scale=2)),
        (x, Named(scale=True)),
        (x, Named(scale=torch.tensor(0.5))),
        (x, Named(scale=None, flag=True, config=None)),
        (x, Named(config={"items": [v], "other": None})),
        (x, Named(config={"items": (v, None)})),
        (x, Named(z=v, y=2 * v)),
        (x, Named(y=2 * v, z=v)),
    ]
    for call in calls:
        pair.agree(*call)
    known = len(pair.amp_model.variants)
    for call in calls:
        pair.agree(*call)
    assert len(pair.amp_model.variants) == known
    assert known - 1 == 11, "x by keyword, defaults spelled out, and the order of keywords make no call of their own"


@pytest.mark.parametrize("low", LOW)
def test_positional_only_and_keyword_only_arguments(low: torch.dtype) -> None:
    x = torch.randn(3, 4)
    pair = Pair.of(Positional(), (x,), low)
    for call in [(x, x > 0), (x, Named(mask=x > 0)), (x, None, Named(k=2)), (x, Named(k=2.5)), (x, None)]:
        pair.agree(*call)
    for args, kwargs in [((), {"x": x}), ((x, None, 2), {}), ((x,), {"q": 1}), ((x, None), {"mask": None}), ((), {})]:
        with pytest.raises(TypeError) as ours:
            pair.amp_model(*args, **kwargs)
        with pytest.raises(TypeError):
            pair.eager(*args, **kwargs)
        assert "argument" in str(ours.value)


@pytest.mark.parametrize("low", LOW)
def test_nested_and_0d_arguments(low: torch.dtype) -> None:
    x = torch.randn(3, 4)

    def run(m: Net, data: Any, record: Record, t: Tensor) -> Any:
        return {"a": m.a(data["x"][0]) * t, "b": m.b(record.values), "t": t * 2, "n": data["x"][1]}

    call = ({"x": [x, None], "unused": (torch.tensor(1),)}, Record(x, "note"), torch.tensor(0.25))
    pair = Pair.of(net(run), call, low)
    pair.agree(*call)
    pair.agree({"x": [x * 2, None], "unused": (torch.tensor(7),)}, Record(x, "other note"), torch.tensor(3.0))


@pytest.mark.parametrize("t", [1e6, 1e-7])
def test_a_0d_argument_beyond_the_range_keeps_its_value(t: float) -> None:
    """torch computes 16-bit tensor times 0-d float32 with the exact scalar; so does autocast."""
    x, scalar = torch.randn(3, 4) / t, torch.tensor(t)
    pair = Pair.of(net(lambda m, x, t: m.b((m.a(x) - m.a.bias) * t)), (x, scalar), torch.bfloat16)
    pair.agree(x, scalar)
    model = net(lambda m, x, t: m.b(x @ m.a.weight * t))
    if t > 1:  # x @ weight is about 1e-6: inside float16's range, with few bits
        x = torch.full((3, 4), 2.0**-10)
        scalar = torch.tensor(2.0**17)
        with torch.no_grad():
            model.a.weight.fill_(2.0**-2)
    else:
        x, scalar = torch.full((3, 4), 2.0**10), torch.tensor(2.0**-26)
    pair = Pair.of(model, (x, scalar), torch.float16)
    pair.agree(x, scalar, backward=False)


def test_integer_and_boolean_arguments_are_never_cast() -> None:
    i, keep = torch.tensor([1, 2, 5000]), torch.tensor([True, False, True])
    model = Net(
        lambda m, i, keep: (m.a(m.e(i)) * keep[:, None], i + 1, ~keep), e=nn.Embedding(5001, 4), a=nn.Linear(4, 4)
    )
    pair = Pair.of(model, (i, keep), torch.float16)
    pair.agree(i, keep)
    assert not [c for c in inserted_casts(pair.amp_model) if c.all_input_nodes[0].name in ("args_0", "args_1")]


# -- multi-output ops -------------------------------------------------------------------------------------------------


def _parts(m: Net, x: Tensor) -> Any:
    y = m.a(x)
    first, second = y.split(2, -1)
    third, fourth = y.chunk(2, -1)
    rows = y.unbind(0)
    return {
        "split": m.c(first),
        "rest": [second, third, m.c(fourth)],
        "rows": m.b(rows[0]),
        "sizes": y.split([1, 3], 1),
    }


def _ordered(m: Net, x: Tensor) -> Any:
    y = m.a(x)
    largest, where = y.max(-1)
    return {
        "topk": y.topk(2),
        "sort": y.sort(-1, descending=True),
        "max": (m.c(largest[:, None].expand(-1, 2)), where),
        "min": y.min(0),
        "median": y.median(-1),
        "kth": y.kthvalue(2),
        "aminmax": y.aminmax(dim=0),
        "unique": torch.unique_consecutive(where, return_counts=True),
    }


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("function", [_parts, _ordered])
def test_multi_output_ops(function: Callable[..., Any], low: torch.dtype) -> None:
    x = torch.randn(3, 4)
    Pair.of(net(function, c=nn.Linear(2, 2)), (x,), low).agree(x)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 3, batch_first=True, **options)
        self.out = nn.Linear(6 if options.get("bidirectional") else 3, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.rnn(x, state)
        return self.out(y), state


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Callable[..., nn.Module], low: torch.dtype) -> None:
    x = torch.randn(2, 5, 4)
    pair = Pair.of(Recurrent(kind, bidirectional=kind is nn.LSTM), (x,), low)
    _, state = pair.eager(x)
    pair.agree(x)
    pair.agree(torch.randn(3, 2, 4))
    pair.agree(x, pytree.tree_map(torch.detach, state))


# -- .float() islands, float64 and complex ----------------------------------------------------------------------------


def _island(m: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = m.a(x)
    inside = y.float()
    inside = torch.tanh(inside) * 3.0
    return m.b(inside), m.b(y), m.b(torch.sigmoid(y))


@pytest.mark.parametrize("low", LOW)
def test_a_float_island_is_kept_and_drags_nothing_along(low: torch.dtype) -> None:
    x = torch.randn(3, 4)
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
    x = torch.randn(3, 4)
    pair = Pair.of(
        net(lambda m, x: (lambda y: m.b(torch.softmax(y.float(), -1).type_as(y) @ y.t() @ y))(m.a(x))), (x,), low
    )
    pair.agree(x)
    assert placed(pair.amp_model, "softmax") == [Precision.FLOAT32]
    assert placed(pair.amp_model, "matmul") == [Precision.LOW] * 2
    assert sum(str(c.args[1]) == "torch.float32" for c in inserted_casts(pair.amp_model)) <= 2


def _double(m: Net, x: Tensor) -> Any:
    exact = x.double().cumsum(0) * math.pi
    return exact, m.b(m.a(x).double().cumsum(0).float()), torch.linspace(0, 1, 5, dtype=torch.float64)


@pytest.mark.parametrize("low", LOW)
def test_float64_is_kept(low: torch.dtype) -> None:
    x = torch.randn(3, 4)
    pair = Pair.of(net(_double), (x,), low)
    found, expected = pair.agree(x)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])


def test_a_float64_model_is_unchanged() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    pair = Pair.of(net(lambda m, x: m.b(m.a(x).tanh())).double(), (x,), torch.float16)
    found, expected = pair.agree(x)
    assert torch.equal(found, expected)
    assert not inserted_casts(pair.amp_model)


def _complex(m: Net, x: Tensor, rotation: Tensor) -> Any:
    pairs = torch.view_as_complex(m.a(x).reshape(3, 2, 2).contiguous())
    turned = torch.view_as_real(pairs * rotation).flatten(1)
    return m.b(turned), torch.fft.irfft(torch.fft.rfft(m.a(x)) * 2), rotation.abs(), x.to(torch.complex64) @ m.w


@pytest.mark.parametrize("low", LOW)
def test_complex_paths_are_kept(low: torch.dtype) -> None:
    x, rotation = torch.randn(3, 4), torch.polar(torch.ones(3, 2), torch.randn(3, 2))
    pair = Pair.of(net(_complex, w=torch.randn(4, 4, dtype=torch.complex64)), (x, rotation), low)
    found, expected = pair.agree(x, rotation)
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[3], expected[3])


# -- custom ops -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("invariants::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad + grad)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    ("category", "precision"),
    [
        ("", Precision.FLOAT32),
        ("keep", Precision.FLOAT32),
        ("deny", Precision.FLOAT32),
        ("allow", Precision.LOW),
        ("infer", Precision.LOW),
        ("clear", Precision.LOW),
        ("promote", Precision.LOW),
    ],
)
def test_a_custom_op_has_its_category_and_unlisted_the_captured_dtype(
    category: str, precision: Precision, low: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(f"{category}: ['invariants::twice']\n" if category else "{}\n")
    x = torch.randn(3, 4)
    pair = Pair.of(net(lambda m, x: m.b(twice(m.a(x)))), (x,), low, op_list=["default", path])
    pair.agree(x)
    assert placed(pair.amp_model, "invariants::twice") == [precision]
    assert pair.amp_model.plan.unlisted == ({} if category else {"invariants::twice": 1})
    (node,) = [n for n in pair.amp_model.graph.nodes if op_name(n) == "invariants::twice"]
    assert dtypes(node) == (torch.float32 if precision is Precision.FLOAT32 else low,)


# -- masks ------------------------------------------------------------------------------------------------------------

HUGE = -3.4e38  # beyond bfloat16's largest number too


def _attend(m: Net, x: Tensor, biased: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(torch.softmax(biased(q @ k.mT / 2), -1) @ v)


def attention(forms: Mapping[str, Callable[..., Tensor]], **held: Any) -> Net:
    """Attention under one mask, written in several ways: one graph, an output for each."""

    def run(m: Net, x: Tensor, *mask: Tensor) -> dict[str, Tensor]:
        (given,) = mask or (m.mask,)
        return {name: form(m, x, given) for name, form in forms.items()}

    return Net(run, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4), **held)


def _sdpa(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), attn_mask=mask))


def _baddbmm(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(torch.softmax(torch.baddbmm(mask, q, k.mT, alpha=0.5), -1) @ v)


def _in_place(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    def biased(scores: Tensor) -> Tensor:
        scores += mask
        return scores

    return _attend(m, x, biased)


def _assigned(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    def biased(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[mask < 0] = NEGATIVE
        return scores

    return _attend(m, x, biased)


ADDITIVE: dict[str, Callable[..., Tensor]] = {
    "add": lambda m, x, mask: _attend(m, x, lambda s: s + mask),
    "right add": lambda m, x, mask: _attend(m, x, lambda s: mask + s),
    "subtract": lambda m, x, mask: _attend(m, x, lambda s: s - (-mask)),
    "add twice": lambda m, x, mask: _attend(m, x, lambda s: s + mask + mask),
    "add in place": _in_place,
    "to dtype": lambda m, x, mask: _attend(m, x, lambda s: s + mask.to(s.dtype)),
    "sliced copy": lambda m, x, mask: _attend(m, x, lambda s: s + mask[:, : x.shape[1]].clone().contiguous()),
    "joined": lambda m, x, mask: _attend(m, x, lambda s: s + torch.cat([mask[:, :1], mask[:, 1:]], 1)),
    "expanded": lambda m, x, mask: _attend(m, x, lambda s: (s[:, None] + mask[:, None].expand(-1, 2, -1, -1))[:, 0]),
    "scaled": lambda m, x, mask: _attend(m, x, lambda s: s + mask * 1.0),
    "clamped": lambda m, x, mask: _attend(m, x, lambda s: torch.clamp(s + mask, min=NEGATIVE)),
    "max": lambda m, x, mask: _attend(m, x, lambda s: torch.max(s + mask, torch.tensor(NEGATIVE))),
    "baddbmm": _baddbmm,
    "inverted": lambda m, x, mask: _attend(m, x, lambda s: s + (1.0 - (mask == 0).float()) * NEGATIVE),
}
FILLED: dict[str, Callable[..., Tensor]] = {
    "masked_fill": lambda m, x, mask: _attend(m, x, lambda s: s.masked_fill(mask < 0, NEGATIVE)),
    "masked_fill_": lambda m, x, mask: _attend(m, x, lambda s: s.masked_fill_(mask < 0, NEGATIVE)),
    "where number": lambda m, x, mask: _attend(m, x, lambda s: torch.where(mask < 0, NEGATIVE, s)),
    "where 0-d": lambda m, x, mask: _attend(m, x, lambda s: torch.where(mask < 0, torch.full((), NEGATIVE), s)),
    "where full_like": lambda m, x, mask: _attend(
        m, x, lambda s: torch.where(mask < 0, torch.full_like(s, NEGATIVE), s)
    ),
    "assigned": _assigned,
    "triangle": lambda m, x, mask: _attend(m, x, lambda s: s + torch.triu(torch.full((3, 3), NEGATIVE), 1)),
    "constant": lambda m, x, mask: _attend(m, x, lambda s: s + torch.tensor([0.0, HUGE, 0.0])),
}


def padding(value: float, *, whole_row: bool) -> Tensor:
    """A mask over (2, 3, 3) scores: the last key is hidden; in one row all keys are, if asked for."""
    mask = torch.zeros(2, 3, 3)
    mask[:, :, 2] = value
    if whole_row:
        mask[0, 1, :] = value
    return mask


def _compare_forms(pair: Pair, *call: Any) -> None:
    """As ``Pair.agree``, each form named where it fails."""
    found, expected = pair.amp_model(*call), pair.eager(*call)
    bound = pair.bound(call)
    wrong = {name: distance(found[name], expected[name]) for name in expected}
    assert {name: gap for name, gap in wrong.items() if not gap <= bound} == {}, f"allowed {bound:.3g}"
    for name in expected:
        pair.original.zero_grad()
        pair.amp_model(*call)[name].sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in pair.original.parameters()), name


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("value", [HUGE, NEGATIVE, -1e9, -1e4])
def test_additive_masks_as_inputs_give_no_nan(value: float, low: torch.dtype) -> None:
    x, mask = torch.randn(2, 3, 4), padding(value, whole_row=value < -1e4)
    forms = {k: v for k, v in ADDITIVE.items() if value in (HUGE, NEGATIVE) or k == "add"}
    _compare_forms(Pair.of(attention(forms), (x, mask), low), x, mask)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("persistent", [True, False])
def test_additive_masks_as_buffers_give_no_nan(persistent: bool, low: torch.dtype) -> None:
    x = torch.randn(2, 3, 4)
    forms = {k: v for k, v in ADDITIVE.items() if k != "inverted"}
    model = attention(forms)
    model.register_buffer("mask", padding(HUGE, whole_row=True), persistent=persistent)
    _compare_forms(Pair.of(model, (x,), low), x)


@pytest.mark.parametrize("low", LOW)
def test_filled_masks_and_constants_give_no_nan(low: torch.dtype) -> None:
    x, mask = torch.randn(2, 3, 4), padding(-1.0, whole_row=True)
    _compare_forms(Pair.of(attention(FILLED), (x, mask), low), x, mask)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("whole_row", [False, True])
def test_masks_through_scaled_dot_product_attention_give_no_nan(whole_row: bool, held: bool, low: torch.dtype) -> None:
    x, mask = torch.randn(2, 3, 4), padding(HUGE, whole_row=whole_row)
    call = (x,) if held else (x, mask)
    _compare_forms(Pair.of(attention({"sdpa": _sdpa}, **({"mask": mask} if held else {})), call, low), *call)


@pytest.mark.parametrize("low", LOW)
def test_a_mask_made_inside_goes_through_scaled_dot_product_attention(low: torch.dtype) -> None:
    def made(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        keep = torch.ones(3, 3, dtype=torch.bool).tril()
        inner = torch.zeros(3, 3).masked_fill(~keep, NEGATIVE)
        return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), attn_mask=inner))

    def boolean(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), attn_mask=mask == 0))

    def causal(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        return m.out(F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), is_causal=True))

    x, mask = torch.randn(2, 3, 4), padding(-1.0, whole_row=False)
    forms = {"made": made, "boolean": boolean, "causal": causal}
    _compare_forms(Pair.of(attention(forms), (x, mask), low), x, mask)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("whole_row", [False, True])
def test_infinite_masks_stay_infinite(whole_row: bool, low: torch.dtype) -> None:
    """A row without any key is NaN in the original, so it is here, and no other is."""
    forms = {k: ADDITIVE[k] for k in ("add", "right add", "add in place", "sliced copy", "baddbmm")}
    forms["fill"] = lambda m, x, mask: _attend(m, x, lambda s: s.masked_fill(mask < 0, -math.inf))
    forms["scores"] = lambda m, x, mask: m.qkv(x)[..., :3] + mask
    x, mask = torch.randn(2, 3, 4), padding(-math.inf, whole_row=whole_row)
    pair = Pair.of(attention(forms), (x, mask), low)
    found, expected = pair.amp_model(x, mask), pair.eager(x, mask)
    for name in forms:
        assert distance(found[name], expected[name]) <= pair.bound((x, mask)), name
    assert found["scores"].isneginf().sum() == mask.isneginf().sum() > 0
    assert found["add"].isnan().any() == whole_row


@pytest.mark.parametrize("low", LOW)
def test_masks_of_torchs_own_attention_modules(low: torch.dtype) -> None:
    x, keys = torch.randn(2, 3, 4), torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -math.inf]])
    model = Net(
        lambda m, x, mask, keys: (
            m.attend(x, x, x, attn_mask=mask, key_padding_mask=keys)[0],
            m.layer(x, src_mask=mask, src_key_padding_mask=keys),
        ),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
        layer=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu"),
    )
    mask = padding(-math.inf, whole_row=False)[0]
    pair = Pair.of(model, (x, mask, keys), low)
    for mode in (True, False):
        pair.train(mode).agree(x, mask, keys)


# -- one cast per value and dtype -------------------------------------------------------------------------------------


def _reused(m: Net, x: Tensor, mask: Tensor) -> Any:
    y = m.a(x)
    low = [m.b(y), m.b(x), m.a(y), y @ x.t(), torch.tanh(y) @ m.a.weight, x @ m.a.weight]
    wide = [y.exp(), y.log_softmax(-1), y.softmax(0), (x + mask).exp(), m.b(y + mask), m.b(y * mask)]
    return low, wide, m.b(torch.cat([y, y.exp()])), F.layer_norm(y, (4,)), y.sum(), y


@pytest.mark.parametrize("low", LOW)
def test_one_cast_per_value_and_dtype(low: torch.dtype) -> None:
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    pair = Pair.of(net(_reused), (x, mask), low)
    pair.agree(x, mask)
    for mode in (True, False):
        casts = inserted_casts(pair.amp_model.train(mode))
        made = Counter((origin(c).value, c.args[1]) for c in casts)
        assert set(made.values()) == {1}
        assert Counter(c.value for c in pair.amp_model.plan.casts) == Counter(origin(c).value for c in casts)
        assert all(len(set(dtypes(c)) | set(dtypes(c.all_input_nodes[0]))) == 2 for c in casts), "none is needless"


@pytest.mark.parametrize("low", LOW)
def test_a_value_that_is_written_to_is_cast_where_it_is_read(low: torch.dtype) -> None:
    def run(m: Net, x: Tensor) -> Any:
        first = m.a(x)
        x.add_(1)
        return first, m.a(x)

    x = torch.randn(3, 4)
    pair = Pair.of(net(run), (x,), low)
    pair.agree(x, backward=False)
    made = Counter((origin(c).value, origin(c).rule) for c in inserted_casts(pair.amp_model))
    mutated = [n for (_, rule), n in made.items() if rule == "mutated"]
    assert sum(mutated) == 2
    assert all(n == 1 for (_, rule), n in made.items() if rule != "mutated")


# -- deterministic, idempotent, the order of the list does not matter -------------------------------------------------

_PRINT = """
import torch, autocastfx
from tests.test_invariants import representative
torch.set_num_threads(1)
amp_model = representative()[1]
for mode in (True, False):
    print(amp_model.train(mode).code, amp_model.plan.to_json())
"""


class Representative(nn.Module):
    """A bit of everything that the passes treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.bn = nn.Embedding(9, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.drop, self.rnn = nn.Dropout(0.1), nn.GRU(4, 4, batch_first=True)
        self.register_buffer("mask", torch.full((5, 5), HUGE).triu(1))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, i: Tensor, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.embed(i) + x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        scores = q @ k.mT / 2 + self.mask[: i.shape[1], : i.shape[1]]
        y = self.drop(torch.softmax(scores.float(), -1).type_as(scores) @ v) + y
        y = self.bn(y.mT).mT
        with torch.no_grad():
            self.average.lerp_(y.mean((0, 1)), 0.1)
        y, last = self.rnn(y)
        y[:, 0] = 0.0
        values, where = y.topk(2, -1)
        return {"out": self.out(y), "last": last, "top": (values, where), "twice": twice(self.out(y))}


def representative(**options: Any) -> tuple[Representative, AmpModule]:
    torch.manual_seed(0)
    model = Representative()
    call = (torch.arange(10).view(2, 5) % 9, torch.randn(2, 5, 4))
    return model, autocastfx.convert(model, call, **{"dtype": torch.bfloat16, **options})


def codes_and_plans(amp_model: AmpModule) -> list[Any]:
    return [(v.code, v.plan) for v in amp_model.variants]


def test_conversion_is_deterministic() -> None:
    first = representative()[1]
    occupied = [fx.Graph() for _ in range(50)]  # other addresses, so that an order by id would change
    second = representative()[1]
    del occupied
    assert codes_and_plans(first) == codes_and_plans(second)
    assert [v.guard for v in first.variants] == [v.guard for v in second.variants]


def test_conversion_is_the_same_in_another_process() -> None:
    folder = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    amp_model = representative()[1]
    expected = [(m.code, m.plan.to_json()) for m in (amp_model.train(mode) for mode in (True, False))]
    assert done.stdout == "".join(f"{code} {plan}\n" for code, plan in expected)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("low", LOW)
def test_conversion_is_idempotent(low: torch.dtype, mode: bool) -> None:
    _, once = representative(dtype=low)
    once.train(mode)
    call = (torch.arange(10).view(2, 5) % 9, torch.randn(2, 5, 4))
    program = torch.export.export(once, call, strict=False)
    again = autocastfx.convert(program, dtype=low)
    assert [c.name for c in inserted_casts(again)] == []
    kept = copy.deepcopy(once.state_dict())
    torch.manual_seed(1)
    first = once(*call)
    once.load_state_dict(kept)
    again.load_state_dict(kept)
    torch.manual_seed(1)
    second = again(*call)
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True))


@pytest.mark.parametrize("low", LOW)
def test_a_model_that_is_low_already_is_unchanged(low: torch.dtype) -> None:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
            self.head = nn.Linear(4, 9)

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.layer(self.embed(i))).log_softmax(-1)

    i = torch.arange(6).view(2, 3)
    model = Transformer().to(low)
    eager = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, (i,), dtype=low)
    for mode in (True, False):
        assert not inserted_casts(amp_model.train(mode))
        assert {n.placement.run for n in amp_model.plan.nodes} == {Precision.CAPTURED}
        torch.manual_seed(0)
        expected = eager.train(mode)(i)
        torch.manual_seed(0)
        assert torch.equal(amp_model(i), expected)


def _reordered(tree: Any, shuffle: random.Random) -> Any:
    if isinstance(tree, dict):
        items = [(k, _reordered(v, shuffle)) for k, v in tree.items()]
        shuffle.shuffle(items)
        return dict(items)
    if isinstance(tree, list):
        items = [_reordered(v, shuffle) for v in tree]
        shuffle.shuffle(items)
        return items
    return tree


@pytest.mark.parametrize("low", LOW)
def test_the_order_of_the_lists_entries_does_not_matter(low: torch.dtype, tmp_path: Path) -> None:
    name = str(low).removeprefix("torch.")
    shuffle = random.Random(0)
    for preset in ("base", name):
        tree = yaml.safe_load((preset_folder() / f"{preset}.yaml").read_text())
        if "extends" in tree:
            tree["extends"] = str(tmp_path / "base.yaml")
        # keep_args lists name arguments by their words, so their order has no meaning either
        (tmp_path / f"{preset}.yaml").write_text(yaml.safe_dump(_reordered(tree, shuffle), sort_keys=False))
    _, usual = representative(dtype=low)
    _, shuffled = representative(dtype=low, op_list=tmp_path / f"{name}.yaml")
    assert [v.code for v in shuffled.variants] == [v.code for v in usual.variants]
    for ours, theirs in zip(usual.plan.nodes, shuffled.plan.nodes, strict=True):
        assert ours.placement == theirs.placement
        assert (ours.decision.category, ours.decision.reason) == (theirs.decision.category, theirs.decision.reason)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW)
def test_gradients_have_their_parameters_dtype_and_exist_where_they_should(low: torch.dtype) -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.teacher(x)
        y = m.b(torch.tanh(m.frozen(m.a(x))))
        return y * m.scale - target + m.double(x.double()).float() + m.a(x).detach()

    model = net(
        run,
        teacher=nn.Linear(4, 4),
        frozen=nn.Linear(4, 4).requires_grad_(False),
        unused=nn.Linear(4, 4),
        double=nn.Linear(4, 4).double(),
        scale=nn.Parameter(torch.tensor(2.0)),
    )
    x = torch.randn(3, 4)
    pair = Pair.of(model, (x,), low)
    pair.agree(x)
    without = {name.partition(".")[0] for name, p in pair.original.named_parameters() if p.grad is None}
    assert without == {"teacher", "frozen", "unused"}
    pair.original.frozen.requires_grad_(True)
    pair.eager.frozen.requires_grad_(True)
    pair.agree(x)
    assert pair.original.frozen.weight.grad is not None


@pytest.mark.parametrize("low", LOW)
def test_gradients_reach_the_inputs(low: torch.dtype) -> None:
    model, x = net(lambda m, x: m.b(torch.tanh(m.a(x)))), torch.randn(3, 4)
    pair = Pair.of(model, (x,), low)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    pair.amp_model(mine).sum().backward()
    pair.eager(theirs).sum().backward()
    assert_close("gradient", mine.grad, theirs.grad, 2 * pair.bound((x,)))


class Straight(torch.autograd.Function):
    """Rounds; its gradient is not the one that tracing through it would give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_a_custom_backward_is_kept() -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        model = net(lambda m, x: m.b(Straight.apply(m.a(x))))
        model.a.weight.copy_(torch.eye(4) * 8)  # integers plus small biases: no rounding is close to a half
        model.a.bias.fill_(0.0625)
    pair = Pair.of(model, (x.round(),), torch.bfloat16)
    pair.agree(x.round())


@pytest.mark.parametrize("low", LOW)
def test_training_follows_float32(low: torch.dtype) -> None:
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    eager = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    model = copy.deepcopy(eager)
    first = F.mse_loss(eager(x), y).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # before the conversion
    amp_model = autocastfx.convert(model, (x,), dtype=low)
    other = torch.optim.SGD(eager.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(30):
        for net_, opt in ((amp_model, optimizer), (eager, other)):
            opt.zero_grad()
            loss = F.mse_loss(net_(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    *_, mine, theirs = losses
    assert theirs < 0.9 * first
    assert abs(mine - theirs) < 30 * torch.finfo(low).eps * first


# -- other sizes, other call structures and both modes ----------------------------------------------------------------


class Shapely(nn.Module):
    """Python that looks at sizes: a branch, a loop over the length, an unrolled cell, a relation of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.cell, self.out = (nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTMCell(4, 3), nn.Linear(3, 4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = torch.tanh(self.a(x)) if x.shape[0] > 3 else self.b(x) * 2
        if x.shape[1] == other.shape[0]:
            y = y + self.a(other)
        elif other.shape[0] == 1:
            y = y - self.b(other)
        else:
            y = y * other.shape[0] + self.a(other).mean(0)
        h = c = torch.zeros(x.shape[0], 3)
        steps = []
        for t in range(x.shape[1]):
            h, c = self.cell(y[:, t], (h, c))
            steps.append(self.drop(self.out(h)))
        return torch.stack(steps, 1) / x.shape[0]


@pytest.fixture(scope="module")
def shapely() -> dict[torch.dtype, Pair]:
    torch.manual_seed(0)
    call = (torch.randn(2, 3, 4), torch.randn(3, 4))
    return {low: Pair.of(Shapely(), call, low) for low in LOW}


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(1, 5),
    length=st.integers(1, 3),
    rows=st.integers(1, 3),
    low=st.sampled_from(LOW),
    mode=st.booleans(),
)
def test_other_sizes_and_modes_give_the_originals_numbers(
    shapely: dict[torch.dtype, Pair], batch: int, length: int, rows: int, low: torch.dtype, mode: bool
) -> None:
    shapely[low].train(mode).agree(torch.randn(batch, length, 4), torch.randn(rows, 4))


SIZES: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], ...]]]] = {
    "branch": (
        lambda m, x: m.a(x) if x.shape[0] > 3 else m.b(x) * 2 if x.shape[0] != 1 else m.b(m.a(x)),
        [((3, 4),), ((4, 4),), ((1, 4),), ((9, 4),), ((2, 4),)],
    ),
    "a batch of one first": (lambda m, x: m.b(m.a(x).tanh()), [((1, 4),), ((5, 4),), ((2, 4),)]),
    "an empty batch": (lambda m, x: m.b(m.a(x).tanh()), [((2, 4),), ((0, 4),), ((3, 4),)]),
    "broadcast": (
        lambda m, x, y: m.b(m.a(x) + y),
        [((3, 4), (3, 4)), ((3, 4), (1, 4)), ((1, 4), (3, 4)), ((3, 4), (3, 1)), ((3, 4), (4,)), ((1, 4), (1, 4))],
    ),
    "size in arithmetic": (
        lambda m, x: m.a(x) * x.shape[0] / 7.0 + math.sqrt(x.shape[-1]) + x.size(0) ** 2,
        [((3, 4),), ((5, 4),), ((1, 4),)],
    ),
    "size in a view": (
        lambda m, x: m.b(m.a(x).view(x.shape[0], -1, 2).flatten(1)).view(-1),
        [((3, 4),), ((5, 4),), ((1, 4),)],
    ),
    "number of dimensions": (
        lambda m, x: m.b(m.a(x).mean(0)) if x.ndim == 3 else m.a(x),
        [((3, 4),), ((2, 3, 4),), ((4,),), ((3, 4),)],
    ),
    "even or odd": (lambda m, x: m.a(x) if x.shape[0] % 2 else m.b(x), [((3, 4),), ((4, 4),), ((7, 4),), ((8, 4),)]),
    "pooled": (
        lambda m, x: m.b(F.adaptive_avg_pool1d(m.a(x).mT, 2).mT),
        [((2, 4, 4),), ((2, 6, 4),), ((1, 5, 4),)],
    ),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", SIZES)
def test_other_sizes_give_the_originals_numbers(name: str, low: torch.dtype) -> None:
    function, sizes = SIZES[name]
    pair = Pair.of(net(function), tuple(torch.randn(s) for s in sizes[0]), low)
    for shapes in sizes:
        pair.agree(*(torch.randn(s) for s in shapes), backward=0 not in shapes[0])


def test_sizes_that_change_nothing_share_a_variant() -> None:
    amp_model = autocastfx.convert(net(lambda m, x: m.b(m.a(x).tanh())), (torch.randn(3, 4),))
    for size in (1, 2, 7):
        amp_model(torch.randn(size, 4))
    assert len(amp_model.variants) == 2


@pytest.mark.parametrize("low", LOW)
def test_frozen_submodules_keep_their_mode(low: torch.dtype) -> None:
    model = Features().train()
    model.bn.eval()
    pair = Pair.of(model, (torch.randn(2, 3, 5, 5),), low)
    x = torch.randn(4, 3, 5, 5)

    def modes(of: nn.Module) -> dict[str, bool]:
        return {name: module.training for name, module in of.named_modules() if not name.startswith("_variants")}

    assert modes(pair.amp_model) == modes(model)
    pair.agree(x)
    assert pair.original.bn.num_batches_tracked == 0, "its statistics are used, not updated"
    pair.train(True).agree(x)
    assert pair.original.bn.num_batches_tracked == 1
    pair.amp_model.bn.eval()
    pair.eager.bn.eval()
    pair.agree(x)
    pair.amp_model.drop.eval()
    pair.eager.drop.eval()
    pair.agree(x)
    assert pair.original.bn.num_batches_tracked == 1
    pair.train(False).agree(x)
