"""Calls of a view inside of modes, traces, transforms and compilers run the converted graph, or are refused."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx.errors import AutocastFXError, UnsupportedError

LOW = torch.bfloat16
X = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.softmax(self.fc1(x), -1))


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.dtypes |= {one.dtype for one in args if isinstance(one, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _views(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)


def net_and_view(*, captured: bool = True) -> tuple[Net, Any]:
    """Return a model and its view, of which a call has been captured or not."""
    net = Net()
    return net, autocastfx.convert(net, (X,) if captured else None, dtype=LOW, check=False)


@pytest.fixture(params=[True, False], ids=["captured", "new"])
def pair(request: pytest.FixtureRequest) -> tuple[Net, Any]:
    """A model and its view, captured or not."""
    return net_and_view(captured=request.param)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_dispatch_mode(pair: tuple[Net, Any]) -> None:
    """A mode sees the converted graph's operators, and no others."""
    _, amp = pair
    with Products() as seen:
        result = amp(X)
    assert seen.dtypes == {LOW}
    assert torch.equal(result, amp(X))


def test_flop_counter(pair: tuple[Net, Any]) -> None:
    """It counts what it counts of the model."""
    net, amp = pair
    counts: list[int] = []
    for model in (net, amp):
        with FlopCounterMode(display=False) as counter:
            model(X)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


class Appending(Net):
    """Keeps its result in a list and a dict of the caller's."""

    def forward(self, x: Tensor, log: list[Any], kept: dict[str, Tensor]) -> Any:
        y = super().forward(x)
        log.append(y)
        kept["y"] = y
        return y, log


@pytest.mark.parametrize("name", ["mode", "transform"])
def test_lists_and_dicts_of_the_caller_get_what_forward_adds(name: str) -> None:
    log, kept, x = [X], {"x": X}, X.clone()
    amp_model = autocastfx.convert(Appending(), (x, log, kept), dtype=LOW)

    def loss(x: Tensor) -> Tensor:
        y, same = amp_model(x, log, kept)
        assert same is log
        assert log[1] is kept["y"] is y
        return y.sum()

    if name == "mode":
        with FlopCounterMode(display=False):
            loss(x)
    else:
        torch.func.grad(loss)(x)
    assert (len(log), log[0] is X, kept["x"] is X) == (2, True, True)


def test_fake_mode(pair: tuple[Net, Any]) -> None:
    """A call on fake tensors gives one, and leaves none in the model."""
    _, amp = pair
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert amp(torch.empty(8, 16)).shape == (8, 4)
    assert type(amp(X)) is Tensor


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_abstract_model(kind: str) -> None:
    """A model without values converts."""
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        net, x = Net(), torch.empty(8, 16)
        amp = autocastfx.convert(net, (x,), dtype=LOW)
        assert amp(x).shape == (8, 4)
    assert amp.plan.casts


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_jit_trace() -> None:
    """A trace by TorchScript records the converted graph."""
    _, amp = net_and_view()
    with pytest.warns(torch.jit.TracerWarning, match="the trace runs the graph for sizes where"):
        traced = cast("Any", torch.jit.trace(amp, (X,)))
    assert torch.equal(traced(X), amp(X))
    assert str(traced.inlined_graph).count("aten::to") >= 4


def test_make_fx(pair: tuple[Net, Any]) -> None:
    """A trace of operators records the converted graph."""
    _, amp = pair
    traced = make_fx(lambda x: amp(x))(X)
    assert "bfloat16" in traced.code
    assert torch.equal(traced(X), amp(X))


def test_export(pair: tuple[Net, Any]) -> None:
    """torch.export takes the graph of the call and the mode."""
    _, amp = pair
    exported = torch.export.export(amp.eval(), (X,))
    assert torch.equal(exported.module()(X), amp(X))
    assert any(LOW in node.args for node in exported.graph.nodes)


def test_export_of_any_size() -> None:
    """A size that is a symbol outside is one inside."""
    _, amp = net_and_view()
    exported = torch.export.export(amp, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert torch.equal(exported.module()(X[:5]), amp(X[:5]))


def test_symbolic_trace_is_refused() -> None:
    """torch.fx gives no tensors to choose a graph by."""
    _, amp = net_and_view()
    with pytest.raises(UnsupportedError, match="freeze"):
        torch.fx.symbolic_trace(amp)


# ---- transforms ------------------------------------------------------------------------------------------------------


def _mean(model: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).float().square().mean()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda model: torch.vmap(model)(X[:, None])[:, 0],
    "grad": lambda model: torch.func.grad(_mean(model))(X),
    "jvp": lambda model: torch.func.jvp(model, (X,), (torch.ones_like(X),))[1],
    "jacrev": lambda model: torch.func.jacrev(model)(X[0]),
    "hessian": lambda model: torch.func.hessian(_mean(model))(X[0]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own transforms
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(pair: tuple[Net, Any], name: str) -> None:
    """A transform goes through the converted graph."""
    net, amp = pair
    with Products() as seen:
        result = TRANSFORMS[name](amp)
    assert LOW in seen.dtypes
    torch.testing.assert_close(result.float(), TRANSFORMS[name](net), atol=2e-2, rtol=2e-2)


def test_gradients_of_each_sample() -> None:
    """vmap over grad over functional_call, whose tensors take the place of the parameters."""
    net, amp = net_and_view()
    parameters = {name: one.detach() for name, one in amp.named_parameters()}

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(amp, parameters, (x[None],)).float().square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X)
    amp(X).float().square().sum().backward()
    weight = net.fc1.weight
    torch.testing.assert_close(each["fc1.weight"].sum(0), weight.grad, atol=2e-2, rtol=2e-2)
    assert weight is amp.fc1.weight
    assert type(weight) is nn.Parameter


def test_ensemble() -> None:
    """Stacked parameters of two models, through a third on the meta device."""
    views = [net_and_view()[1] for _ in range(2)]
    base = copy.deepcopy(views[0]).to("meta")
    stacked = torch.func.stack_module_state(views)

    def call(parameters: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (X,))

    for result, amp in zip(torch.vmap(call)(*stacked), views, strict=True):
        torch.testing.assert_close(result, amp(X), atol=1e-2, rtol=1e-2)


# ---- compilers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, full: bool) -> None:
    """A compiled view is the converted graph, compiled."""
    net, amp = net_and_view()
    result = torch.compile(amp, backend=backend, fullgraph=full)(X)
    torch.testing.assert_close(result, amp(X), atol=1e-2, rtol=1e-2)
    assert not torch.allclose(result, net(X), atol=1e-5)
    result.sum().backward()
    assert net.fc1.weight.grad is not None


def test_inside_of_a_compiled_function() -> None:
    """The compiler compiles the converted graph by itself."""
    net, amp = net_and_view()
    graphs: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module.code)
        return module

    with torch.no_grad():
        result = torch.compile(lambda x: amp(x * 2).sin(), backend=backend)(X)
    torch.testing.assert_close(result, amp(X * 2).sin(), atol=1e-2, rtol=1e-2)
    assert not torch.allclose(result, net(X * 2).sin(), atol=1e-5)
    assert any("bfloat16" in code for code in graphs)


def test_inside_of_one_graph_is_refused() -> None:
    """A graph that may not break is told what to call in its place."""
    _, amp = net_and_view()
    with pytest.raises(RuntimeError, match="freeze"):
        torch.compile(lambda x: amp(x * 2).sin(), backend="eager", fullgraph=True)(X)
    with pytest.raises(RuntimeError, match="freeze"):
        torch.export.export(amp, (X,), strict=True)


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
def test_stance(stance: str) -> None:
    """No stance makes it run in float32."""
    net, amp = net_and_view()
    with torch.compiler.set_stance(stance):
        result = amp(X)
    assert not torch.equal(result, net(X))
    assert torch.equal(result, amp(X))


def test_dynamo_switched_off() -> None:
    """What is captured runs, and nothing else can."""
    net, amp = net_and_view()
    with torch._dynamo.config.patch(disable=True):
        assert not torch.equal(amp(X), net(X))
        with pytest.raises(AutocastFXError, match="float32"):
            autocastfx.convert(Net(), (X,), dtype=LOW)
        with pytest.raises(AutocastFXError, match="float32"):
            autocastfx.convert(Net(), dtype=LOW)(X)


def test_outside_of_the_compiler() -> None:
    """torch.compiler.disable does not reach it."""
    net, amp = net_and_view()
    assert not torch.equal(cast("Any", torch.compiler.disable(lambda: amp(X)))(), net(X))


# ---- other places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(pair: tuple[Net, Any], reentrant: bool) -> None:
    """The gradients are those without."""
    net, amp = pair
    gradients: list[Tensor | None] = []
    for around in (lambda x: checkpoint(amp, x, use_reentrant=reentrant), amp):
        net.zero_grad()
        around(X.clone().requires_grad_()).sum().backward()
        gradients.append(net.fc1.weight.grad)
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


def test_saved_tensor_hooks(pair: tuple[Net, Any]) -> None:
    """Hooks see what the converted graph keeps."""
    _, amp = pair
    kept: set[torch.dtype] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.add(one.dtype) or one, lambda one: one):
        result = amp(X)
    result.sum().backward()
    assert LOW in kept


def test_in_a_hook_of_backward(pair: tuple[Net, Any]) -> None:
    """A call while gradients are computed."""
    net, amp = pair
    results: list[Tensor] = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: results.append(amp(X)))
    y.sum().backward()
    assert not torch.equal(results[0], net(X))


def test_under_autocast(pair: tuple[Net, Any]) -> None:
    """A region around the call decides nothing."""
    _, amp = pair
    with torch.autocast("cpu", LOW):
        result = amp(X)
    assert torch.equal(result, amp(X))


def test_forked_worker() -> None:
    """A process that was forked computes the same."""
    _, amp = net_and_view()
    amp(X)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            queue.put(amp(X).tolist())

    process = context.Process(target=work)
    process.start()
    result = torch.tensor(queue.get())
    process.join()
    assert torch.equal(result, amp(X).detach())


class Quadrupled(TorchFunctionMode):
    """A mode whose code Dynamo captures with the model's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 4 if function is F.linear else result


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_a_mode_of_torch_function_is_applied_once(way: str) -> None:
    x = torch.randn(4, 16)
    amp_model = getattr(autocastfx, way)(nn.Linear(16, 16), dtype="bfloat16")
    for _ in range(2):
        with Quadrupled():
            inside = amp_model(x)
        assert inside.equal(4 * amp_model(x))


def test_a_graph_for_any_size_reads_the_size_of_one_example() -> None:
    amp_model = autocastfx.convert(Numbered(), dtype=LOW)
    for rows in (4, 6):
        amp_model(torch.randn(rows, 16))
    batch = torch.randn(3, 5, 16)
    expected = torch.stack([amp_model(one) for one in batch])
    assert len(amp_model.variants) == 2
    torch.testing.assert_close(torch.vmap(amp_model)(batch), expected, rtol=2**-7, atol=2**-7)


class Numbered(nn.Module):
    """Adds to each row its number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.arange(len(x))[:, None]
