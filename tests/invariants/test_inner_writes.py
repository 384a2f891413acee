"""Regions of code (no_grad, autocast, checkpointing) write through views, and what they write into is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx.graph.alias import mutated_inputs
from tests.helpers import relative_error

LOW = torch.bfloat16
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Products, whose results have 16 bits, and a norm, whose results do not."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _view_of_low(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h[:, :16].zero_()
    return m.b(h)


def _assigned(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h[:, :16] = h[:, 16:] * 3
    return torch.cat((m.b(h), h), 1)


def _between_two_reads(m: Net, x: Tensor) -> Tensor:
    h = m.norm(x)
    y = m.a(h)
    with torch.no_grad():
        h[:, :16].zero_()
    return y + m.b(h)


def _view_from_outside(m: Net, x: Tensor) -> Tensor:
    h = m.norm(x)
    y, half = m.a(h), h[:, :16]
    with torch.no_grad():
        half.zero_()
    return y + m.b(h)


def _detached(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    detached = h.detach()
    with torch.no_grad():
        detached[:, :16].zero_()
    return m.b(h)


def _data(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h.data.mul_(0.25)
    return m.b(h)


def _nested(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        h.t()[:16].mul_(3)
    return m.b(h)


def _autocast_off(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        h[:, :16].mul_(3)
    return m.b(h)


def _writes(x: Tensor, h: Tensor, scale: float) -> Tensor:
    h[:, :16].mul_(scale)
    return x + 1


def _checkpoint(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    z = checkpoint(_writes, x, h, 3.0, use_reentrant=False)
    return torch.cat((m.b(h), h, z), 1)


def _checkpoint_between(m: Net, x: Tensor) -> Tensor:
    h = m.norm(x)
    y = m.a(h)
    z = checkpoint(_writes, x, h, 3.0, use_reentrant=False)
    return y + m.b(h) + z


BODIES = (
    *(_view_of_low, _assigned, _between_two_reads, _view_from_outside, _detached, _data, _nested, _autocast_off),
    *(_checkpoint, _checkpoint_between),
)
Way = Callable[..., Any]


def converted(model: nn.Module, **options: Any) -> nn.Module:
    return autocastfx.convert(model, X, dtype=LOW, **options)


def enabled(model: nn.Module, **options: Any) -> nn.Module:
    return autocastfx.enable(model, dtype=LOW, inner="eager", **options)


ways = pytest.mark.parametrize("way", [converted, enabled])


@ways
@pytest.mark.parametrize("body", BODIES)
def test_the_value_is_written(body: Any, way: Way) -> None:
    model = Net(body)
    assert relative_error(way(copy.deepcopy(model))(X), model(X)) < torch.finfo(LOW).eps


@ways
@pytest.mark.parametrize("body", [_view_of_low, _assigned, _detached, _data, _nested])
def test_gradients_are_those_of_the_model(body: Any, way: Way) -> None:
    model = Net(body)
    ours = way(copy.deepcopy(model))
    for one in (ours, model):
        one(X).square().mean().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), model.parameters(), strict=True)]
    assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
    assert max(relative_error(p, q) for p, q in pairs if p is not None and q is not None) < 2 * torch.finfo(LOW).eps


def test_a_graph_says_what_it_writes_inside() -> None:
    graph = autocastfx.convert(Net(_between_two_reads), X, dtype=LOW, check=False).graph
    (region,) = (node for node in graph.nodes if "set_grad_enabled" in str(node.target))
    assert [node.name for node in mutated_inputs(region)] == ["layer_norm"]


def _assign(w: Tensor) -> None:
    w[:16] = w[:16] * 0.5 + 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda w: w.data.mul_(0.5).add_(1.0),
    "detach": lambda w: w.detach().mul_(0.5).add_(1.0),
    "part": lambda w: w[:16].mul_(0.5).add_(1.0),
    "assigned": _assign,
    "transposed": lambda w: w.T.mul_(0.5).add_(1.0),
    "itself": lambda w: w.mul_(0.5).add_(1.0),
}


@ways
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.filterwarnings("ignore:.*weights=.cached. changes nothing")
def test_a_working_copy_follows_what_forward_writes_into_its_parameter(how: str, is_after: bool, way: Way) -> None:
    write = WRITES[how]

    def body(m: Net, x: Tensor) -> Tensor:
        y = m.a(x) if is_after else x
        with torch.no_grad():
            write(m.a.weight)
        return y if is_after else m.a(x)

    model = Net(body)
    ours = way(copy.deepcopy(model), weights="cached")
    with torch.no_grad():
        for _ in range(3):
            assert relative_error(ours(X), model(X)) < torch.finfo(LOW).eps
