"""``x.data`` and ``x.data = new`` in forward: the converted model does what the model does, to each tensor."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.capture.rewrites import data, set_data
from autocastfx.errors import CaptureError, UnsupportedError
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
    assert not [node for node in amp_model.graph.nodes if node.target in (data, set_data)]
    assert [op_name(node) for node in amp_model.graph.nodes].count("detach") == 2


def _grown(m: Net, x: Tensor) -> Tensor:
    m.b.weight.data = torch.cat([m.b.weight.data, x])
    return m.a(x)


def _narrowed(m: Net, x: Tensor) -> Tensor:
    m.count.data = m.count.data.double()
    return m.a(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            _grown,
            r"'b\.weight' .*float32 \[8, 8\] on cpu becomes float32 \[12, 8\] .*test_data_writes\.py:\d+: m\.b",
        ),
        (
            _narrowed,
            r"'count' .*float32 \[8\] on cpu becomes float64 \[8\] .*test_data_writes\.py:\d+: m\.c",
        ),
    ],
)
def test_other_sizes_and_dtypes_are_refused_with_name_and_line(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        autocastfx.convert(model(function), (X,), dtype=torch.bfloat16)


def test_torch_compile_refuses_the_assignment_by_name_and_takes_the_write() -> None:
    for function in (_momentum, _after_use, _old_view):
        assigns = autocastfx.convert(model(function), (X,), dtype=torch.bfloat16)
        with pytest.raises(Exception, match=r"assigns to the \.data of a tensor") as caught:
            torch.compile(assigns, backend="aot_eager", fullgraph=True)(X)
        assert "UnsupportedError" in str(caught.value) or isinstance(caught.value, UnsupportedError)
    writes = autocastfx.convert(model(_codes), (X,), dtype=torch.bfloat16)
    expected = autocastfx.convert(model(_codes), (X,), dtype=torch.bfloat16)
    torch.testing.assert_close(torch.compile(writes, backend="aot_eager", fullgraph=True)(X), expected(X))
    torch.testing.assert_close(dict(writes.named_buffers()), dict(expected.named_buffers()))
