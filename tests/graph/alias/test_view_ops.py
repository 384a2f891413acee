"""Which ops give elements of their input as they are, by what torch does when it runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autocastfx.graph.alias import is_view, is_view_or_copy, moves_each_once, takes_any_layout

X = torch.arange(24.0).reshape(2, 3, 4)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(6, 4),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "select": lambda x: x.select(0, 1),
    "slice": lambda x: x[:, 1:],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "movedim": lambda x: x.movedim(0, 1),
    "flatten": lambda x: x.flatten(),
    "reshape": lambda x: x.reshape(4, 6),
    "contiguous": torch.ops.aten.contiguous.default,
    "alias": torch.ops.aten.alias.default,
}
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view.default(x, [6, 4]),
}
REPEATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expand": lambda x: x.unsqueeze(0).expand(5, 2, 3, 4),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "unfold": lambda x: x.unfold(2, 2, 1),
}
COMPUTES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "relu": torch.relu,
    "add_": lambda x: x.clone().add_(1),
    "index": lambda x: x[torch.tensor([0, 1])],
    "sum": lambda x: x.sum(0),
    "bits": lambda x: x.view(torch.int32),
    "imag": lambda x: torch.view_as_complex(x.unflatten(2, (2, 2))).imag,
    "as_real": lambda x: torch.view_as_real(x.to(torch.complex64)),
}


def last(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.fx.Node:
    """The node that gives the result of ``function``."""
    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(X)
    return next(node for node in reversed(traced.graph.nodes) if node.op == "call_function")


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_what_moves_each_element_once(name: str) -> None:
    function = (VIEWS | COPIES)[name]
    node = last(function)
    assert (is_view(node), is_view_or_copy(node), moves_each_once(node)) == (name in VIEWS, True, True)
    result = function(X)
    assert set(result.flatten().tolist()) <= set(X.flatten().tolist())
    assert result.unique().numel() == result.numel()


@pytest.mark.parametrize("name", REPEATS)
def test_what_shows_an_element_twice(name: str) -> None:
    node = last(REPEATS[name])
    assert (is_view_or_copy(node), moves_each_once(node)) == (True, False)
    result = REPEATS[name](X)
    assert result.unique().numel() < result.numel()


@pytest.mark.parametrize("name", COMPUTES)
def test_what_computes_is_neither(name: str) -> None:
    node = last(COMPUTES[name])
    assert (is_view(node), is_view_or_copy(node), moves_each_once(node)) == (False, False, False)


@pytest.mark.parametrize("name", ["reshape", "flatten", "contiguous", "view", "unsqueeze"])
def test_what_takes_any_layout_runs_on_any_strides(name: str) -> None:
    strided = torch.arange(24.0).reshape(4, 3, 2).permute(2, 1, 0)
    try:
        VIEWS[name](strided)
        fails = False
    except RuntimeError:
        fails = True
    assert fails == (name == "view")
    assert takes_any_layout(last(VIEWS[name])) == (name in ("reshape", "flatten", "contiguous"))


def test_a_cast_is_a_view_but_moves_nothing_as_it_is() -> None:
    node = last(lambda x: x.to(torch.float64))
    assert (is_view(node), moves_each_once(node)) == (True, False)
