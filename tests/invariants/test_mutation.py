"""Mutated inputs and buffers really updated, in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import autocastfx
from autocastfx import AmpModule
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes
from tests.helpers import TORCH
from tests.invariants.pair import LOW, Features, Net, Pair, bump, net

pytestmark = [pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")]


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
    rows = torch.empty(x.shape[0], 16)
    rows[:, :8] = m.a(x)
    rows[:, 8:] = x
    out = torch.zeros(5, 16).index_add_(0, torch.arange(3), rows)
    return m.b(out.unflatten(1, (2, 8)))


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
    "EMA under no_grad": (_ema, {"average": torch.ones(8), "steps": torch.zeros((), dtype=torch.long)}),
    "EMA copied": (_ema_copied, {"average": torch.ones(8)}),
    "EMA assigned": (_ema_assigned, {"average": torch.ones(8)}),
    "x.add_ on an input": (_input_added, {}),
    "view of an input": (_input_view, {}),
    "copy_ into an input": (_input_gets_result, {}),
    "in place on views": (_in_place_on_views, {}),
    "index assignment": (_index_assignment, {}),
    "relu_ after linear": (_relu_after_linear, {}),
    "dropout, then in place": (_dropout_in_place, {}),
    "assembled": (_assembled, {}),
    "rows of a buffer": (_cache, {"cache": torch.zeros(6, 8)}),
    "augmented assignments": (_augmented, {}),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_mutated_is_updated(name: str, low: torch.dtype) -> None:
    if name == "rows of a buffer" and TORCH < (2, 13):
        pytest.skip("torch.export refuses it before torch 2.13")
    function, buffers = MUTATIONS[name]
    x = torch.randn(3, 8)
    pair = Pair.of(net(function, **copy.deepcopy(buffers)), (x,), low)
    for mode in (True, False):
        for _ in range(2):  # the second call starts from the first one's buffers
            pair.train(mode).agree(torch.randn(3, 8))


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
    buffers = {"average": torch.ones(8), "steps": torch.zeros((), dtype=torch.long)}
    model = net(function, **buffers)
    x = torch.randn(3, 8)
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
    x = torch.ones(3, 8)
    step = torch.finfo(low).eps / 8
    model = net(lambda m, x: m.b(m.a(x.add_(step))))
    amp_model = autocastfx.convert(model, (x.clone(),), dtype=low)
    amp_model(x)
    assert torch.equal(x, torch.ones(3, 8) + step)


@torch.library.custom_op("invariants::inc_", mutates_args=("x",))
def inc_(x: Tensor) -> None:
    x.add_(1)


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
    x = torch.randn(3, 8)
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
        pair.agree(torch.randn(2, 3, 5, 5))


def test_a_planted_lost_count_is_caught() -> None:
    pair = Pair.of(Features(), (torch.randn(2, 3, 5, 5),), torch.bfloat16)
    counts = [n for n in pair.amp_model.graph.nodes if op_name(n) == "add_" and dtypes(n) == (torch.int64,)]
    assert counts
    for node in counts:
        pair.amp_model.graph.erase_node(node)
    pair.amp_model.recompile()
    with pytest.raises(AssertionError, match=r"buffer bn\.num_batches_tracked"):
        pair.agree(torch.randn(2, 3, 5, 5))


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
    x = torch.randn(3, 8)
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
