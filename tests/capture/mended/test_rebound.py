"""Buffers that forward assigns anew: the converted model gives them the same values, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError
from tests.invariants.pair import LOW, Net, Pair, distance, net

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def _read_before(m: Net, x: Tensor) -> Tensor:
    """Backward needs the buffer as it was."""
    y = m.a(x) * m.held
    m.held = m.held * 0.9 + x.mean(0) * 0.1
    return m.b(y)


def _view_given_out(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    old = m.held[1:]
    m.held = m.held * 0.9 + x.mean(0) * 0.1
    return m.a(x), old


def _old_and_new_given_out(m: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    old = m.held
    m.held = m.held + x.mean(0)
    return m.a(x), old, m.held


def _in_place_first(m: Net, x: Tensor) -> Tensor:
    m.held.mul_(2)
    m.held = m.held + x.mean(0)
    m.held.add_(1)
    return m.a(x) + m.held


def _set_to_zeros(m: Net, x: Tensor) -> Tensor:
    y = m.a(x) * m.held
    m.held = torch.zeros(8)
    return y


def _in_a_submodule(m: Net, x: Tensor) -> Tensor:
    m.norm.running_mean = m.norm.running_mean * 0.9 + x.mean(0) * 0.1
    return m.a(x) * m.norm.running_mean


REBOUND = (_read_before, _view_given_out, _old_and_new_given_out, _in_place_first, _set_to_zeros, _in_a_submodule)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("function", REBOUND)
def test_outputs_gradients_and_buffers_agree(function: Callable[..., Any], low: torch.dtype) -> None:
    pair = Pair.of(net(function, held=torch.ones(8), norm=nn.BatchNorm1d(8)), (X,), low)
    for mode in (True, False):
        for size in (3, 5, 3):
            pair.train(mode).agree(torch.randn(size, 8))


def _grows(m: Net, x: Tensor) -> Tensor:
    m.held = torch.cat([m.held, x.mean(0)])
    return m.a(x)


def _shrinks(m: Net, x: Tensor) -> Tensor:
    """Its new value broadcasts to the old size."""
    m.held = m.held.sum(0, keepdim=True)
    return m.a(x)


def _other_dtype(m: Net, x: Tensor) -> Tensor:
    m.steps = m.steps + 0.5
    return m.a(x)


def _goes(m: Net, x: Tensor) -> Tensor:
    m.held = None
    return m.a(x)


def _comes(m: Net, x: Tensor) -> Tensor:
    m.register_buffer("last", x.mean(0), persistent=False)
    return m.a(x)


def _random(m: Net, x: Tensor) -> Tensor:
    m.register_buffer("noise", torch.randn(8), persistent=False)
    return m.a(x) + m.noise


def _tied(m: Net, x: Tensor) -> Tensor:
    m.held = m.held + 1
    return m.a(x) * m.same


@pytest.mark.parametrize("function", [_grows, _shrinks, _other_dtype, _goes, _comes, _random, _tied])
def test_buffers_of_other_sizes_and_dtypes_and_new_ones_are_the_models(function: Callable[..., Any]) -> None:
    held = torch.ones(8)
    model = net(function, held=held, same=held, steps=torch.tensor(1))
    if function is not _tied:
        del model.same
    expected = copy.deepcopy(model)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_buffers(remove_duplicate=False)}
    amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16)
    after = dict(model.named_buffers(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is tensor and torch.equal(tensor, content) for name, (tensor, content) in before.items())
    for seed in range(3):
        torch.manual_seed(seed)
        found = amp_model(X)
        torch.manual_seed(seed)
        assert distance(found, expected(X)) <= 8 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))


def _parameter(m: Net, x: Tensor) -> Tensor:
    m.scale = nn.Parameter(m.scale * 2)
    return m.a(x) * m.scale


def test_a_parameter_made_in_forward_is_refused_with_the_line() -> None:
    model = net(_parameter, scale=nn.Parameter(torch.ones(8)))
    scale = model.scale
    with pytest.raises(CaptureError, match=r"(?s)nn\.Parameter.*test_rebound\.py:\d+: m\.scale = .*enable"):
        autocastfx.convert(model, (X,), dtype=torch.bfloat16)
    assert model.scale is scale


def test_a_table_of_positions_may_grow() -> None:
    """The graph makes it in each call: nothing but sizes has a part in it."""

    def longer(m: Net, x: Tensor) -> Tensor:
        if m.table.shape[0] < x.shape[0]:
            m.table = torch.arange(x.shape[0]).float()
            m.register_buffer("squares", m.table * m.table, persistent=False)
        return m.a(x) + m.table[: x.shape[0], None] + m.squares[: x.shape[0], None]

    model = net(longer, table=torch.zeros(0))
    pair = Pair.of(model, (X,), torch.bfloat16)
    for size in (3, 5, 2):
        x = torch.randn(size, 8)
        assert distance(pair.amp_model(x), pair.eager(x)) <= pair.bound((x,))
