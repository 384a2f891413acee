"""``x.data`` and ``x.data = new`` in forward: the converted model does what the model does, to each tensor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.errors import CaptureError
from autocastfx.graph.names import op_name
from tests.invariants.pair import LOW, Net, Pair, net

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _momentum(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """As MoCo keeps its slow encoder."""
    if m.training:
        for slow, fast in zip(m.b.parameters(), m.a.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
    return m.a(x), m.b(x)


def _codes(m: Net, x: Tensor) -> Tensor:
    """As VQ-VAE keeps its codes."""
    nearest = (x[:, None] - m.codes[None]).pow(2).sum(-1).argmin(-1)
    code = F.embedding(nearest, m.codes)
    if m.training:
        seen = F.one_hot(nearest, 8).float()
        m.count.data.mul_(0.99).add_(seen.sum(0), alpha=0.01)
        m.codes.data.copy_(m.codes.data + 0.01 * (seen.t() @ x))
    return m.a(x + (code - x).detach())


def _after_use(m: Net, x: Tensor) -> Tensor:
    """Backward reads the weight as it was, for a product keeps a view of it."""
    y = m.b(m.a(x))
    m.b.weight.data = m.b.weight.data * 0.5
    return y


def _in_place(m: Net, x: Tensor) -> Tensor:
    """Autograd does not see the write between two uses."""
    m.b.weight.data.mul_(0.5)
    y = m.a(m.b(x))
    m.b.weight.data.clamp_(min=-0.1)
    return y + m.b(x)


def _old_view(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    old = m.b.weight.data
    m.b.weight.data = old * 2
    return m.b(x), old


def _tied(m: Net, x: Tensor) -> Tensor:
    m.b.weight.data = m.a.weight.data
    m.a.weight.data.mul_(0.9)
    return m.b(m.a(x))


def _new_written(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    new = m.b.weight.data * 2
    m.b.weight.data = new
    new.mul_(0.5)
    m.b.weight.data.add_(1)
    return m.b(m.a(x)), new @ x.t()


def _read(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x) * (x.data > 0), m.b.weight.data * 2


WRITES = (_momentum, _codes, _after_use, _in_place, _old_view, _tied, _new_written, _read)
CONVERSIONS: list[dict[str, Any]] = [*({"dtype": low} for low in LOW), {"dtype": LOW[1], "weights": "cached"}]


def model(function: Callable[..., Any]) -> Net:
    torch.manual_seed(0)
    return net(function, codes=torch.randn(8, 8), count=torch.full((8,), 500.0))


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=str)
@pytest.mark.parametrize("function", WRITES)
def test_parameters_buffers_outputs_and_gradients_agree(
    function: Callable[..., Any], conversion: dict[str, Any]
) -> None:
    options = dict(conversion)
    pair = Pair.of(model(function), (X,), options.pop("dtype"), **options)
    for mode in (True, False):
        for size in (4, 6):
            torch.manual_seed(size)
            pair.train(mode).agree(torch.randn(size, 8))
            for (name, expected), found in zip(pair.eager.named_parameters(), pair.original.parameters(), strict=True):
                torch.testing.assert_close(found, expected, msg=name)
                assert found.is_leaf


@pytest.mark.parametrize("function", WRITES)
def test_a_pickled_model_writes_too(function: Callable[..., Any]) -> None:
    amp_model = autocastfx.convert(model(function), (X,), dtype=torch.bfloat16)
    again = pickle.loads(pickle.dumps(amp_model))
    for _ in range(2):
        found, expected = (pytree.tree_leaves(m(X)) for m in (again, amp_model))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), amp_model.parameters(), strict=True))


def test_a_capture_leaves_the_model_as_it_was() -> None:
    held = model(_momentum)
    before = {name: (tensor, tensor.data_ptr(), tensor.detach().clone()) for name, tensor in held.named_parameters()}
    autocastfx.convert(held, (X,), dtype=torch.bfloat16)
    for name, tensor in held.named_parameters():
        same, place, content = before[name]
        assert tensor is same
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, content)


def test_what_nobody_writes_into_is_detached() -> None:
    amp_model = autocastfx.convert(model(_read), (X,), dtype=torch.bfloat16)
    assert not [node for node in amp_model.graph.nodes if node.target is torch.ops.autocastfx.data.default]
    assert [op_name(node) for node in amp_model.graph.nodes].count("detach") == 2


def _grown(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    m.b.weight.data = torch.cat([m.b.weight.data, x])
    return m.a(x), m.b.weight * 2


def test_a_parameter_that_grows_is_captured_for_each_size() -> None:
    held = model(_grown)
    expected = copy.deepcopy(held)
    amp_model = autocastfx.convert(held, (X,), dtype=torch.bfloat16)
    for size in (12, 16, 20):
        for found, result in zip(amp_model(X), expected(X), strict=True):
            torch.testing.assert_close(found, result, rtol=0, atol=16 * torch.finfo(torch.bfloat16).eps)
        assert held.b.weight.shape == (size, 8)
        assert torch.equal(held.b.weight, expected.b.weight)


def _narrowed(m: Net, x: Tensor) -> Tensor:
    m.count.data = m.count.data.double()
    return m.a(x)


def test_another_dtype_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"(?s)to different dtype.*test_data_writes\.py:\d+: m\.count\.data = "):
        autocastfx.convert(model(_narrowed), (X,), dtype=torch.bfloat16)


@pytest.mark.parametrize("function", [_momentum, _codes, _in_place])
def test_compiled_the_writes_are_the_same(function: Callable[..., Any]) -> None:
    held = [autocastfx.convert(model(function), (X,), dtype=torch.bfloat16) for _ in range(2)]
    expected, compiled = held[0], torch.compile(held[1], backend="aot_eager", fullgraph=True)
    for _ in range(2):
        results = compiled(X), expected(X)
        torch.testing.assert_close(*results)
        for result in results:
            pytree.tree_leaves(result)[0].sum().backward()
        torch.testing.assert_close(*([p.grad for p in one.a.parameters()] for one in held))
        for names in ("named_parameters", "named_buffers"):
            torch.testing.assert_close(dict(getattr(held[1], names)()), dict(getattr(expected, names)()))


@pytest.mark.parametrize("function", [_after_use, _old_view])
def test_torch_compile_refuses_by_name_where_the_old_data_is_read_later(function: Callable[..., Any]) -> None:
    compiled = torch.compile(autocastfx.convert(model(function), (X,), dtype=torch.bfloat16), backend="aot_eager")
    with pytest.raises(Exception, match=r"assigns to the \.data of a tensor"):
        compiled(X)
