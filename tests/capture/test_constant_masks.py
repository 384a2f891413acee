"""What capture takes out: values that are settled before any input is known, and what they make needless."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import autocastfx
from autocastfx.graph.op_name import op_name
from tests.helpers import Function

X, SEEN = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(2, 5, dtype=torch.bool)


def ops(function: Callable[..., object], *inputs: Tensor) -> list[str]:
    """The computing ops of what is captured, which gives what ``function`` gives."""
    amp_model = autocastfx.convert(Function(function), inputs, op_list=autocastfx.OpList(unlisted="keep"))
    torch.testing.assert_close(amp_model(*inputs), function(*inputs), rtol=0, atol=0)
    return [op_name(n) for n in amp_model.graph.nodes if n.op == "call_function" and "size" not in op_name(n)]


def trivial(length: int | torch.SymInt) -> Tensor:
    """A mask that shows all, as a model may build it."""
    position = torch.arange(length) + 0
    shown = torch.ones((), dtype=torch.bool) & (position[None, None, :, None] >= 0)
    return torch.where(shown, torch.zeros(()), torch.finfo(torch.float32).min)


def test_a_mask_that_shows_all_is_not_added() -> None:
    assert ops(lambda x: (x + trivial(x.shape[2])).exp(), X) == ["exp"]


def test_attention_gets_no_mask_that_hides_nothing() -> None:
    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=trivial(x.shape[2]).expand(-1, -1, -1, 5))

    assert ops(attend, X) == ["scaled_dot_product_attention"]


def test_and_with_true_is_dropped() -> None:
    def seen(x: Tensor, seen: Tensor) -> Tensor:
        shown = (torch.arange(1) >= 0) & (seen[:, None, None, :] & True)
        return torch.where(shown, x @ x.mT, 0.0)

    assert not {"__and__", "ge", "arange"} & set(ops(seen, X, SEEN))


def written(x: Tensor) -> Tensor:
    mask = torch.zeros(5, 1)
    mask[1:] = -1.0
    return x.exp() + mask


def viewed(x: Tensor) -> Tensor:
    return (torch.zeros(2, 3, 4, 5) + x.exp().mT).view(2, -1)


def strided(x: Tensor) -> Tensor:
    return (torch.zeros(2, 3, 4, 5) + x.exp().mT).as_strided((4, 4), (4, 1))


KEPT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a mask that hides": (lambda x: x.exp() + torch.where(torch.arange(5) >= 1, 0.0, -1.0)[:, None], "add"),
    "a mask that is written to": (written, "add"),
    "strides, for a view": (viewed, "add"),
    "strides": (strided, "add"),
    "a number that is cut": (lambda x: (x > 0) & (torch.full((), 0.5, dtype=torch.long) > 0), "__and__"),
    "a number that wraps": (lambda x: (x > 0) & (torch.zeros((), dtype=torch.uint8) > -1), "__and__"),
    "bits that are read anew": (
        lambda x: x.exp() + torch.zeros((), dtype=torch.int32).view(torch.float32),
        "add",
    ),
    "a dtype that widens": (lambda x: (x > 0).int() + torch.zeros(()), "add"),
    "a shape that widens": (lambda x: x[:1].exp() + torch.zeros(2, 1, 1, 1), "add"),
    "bits": (lambda x: (x > 0).int() & torch.ones((), dtype=torch.int32), "__and__"),
    "what is written to": (lambda x: (x.exp() + torch.zeros(())).mul_(2) + x.exp(), "add"),
    "ones are no zeros": (lambda x: x.exp() + torch.ones(()), "add"),
    "zero minus": (lambda x: torch.zeros(()) - x.exp(), "sub"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_something_stays(name: str) -> None:
    function, op = KEPT[name]
    assert op in ops(function, X)


def fill(buffer: Tensor, x: Tensor) -> Tensor:
    """A function without a schema, which a list names: it is not looked into."""
    return buffer.copy_(x).sum()


def test_what_a_function_may_write_into_is_not_settled() -> None:
    def filled(x: Tensor) -> Tensor:
        buffer = torch.zeros_like(x)
        total = fill(buffer.view(-1), x.view(-1))
        return (x + buffer).exp() + total

    lists = autocastfx.OpList.of({"unlisted": "keep", "keep": [f"{__name__}.fill"]})
    amp_model = autocastfx.convert(Function(filled), (X,), op_list=lists)
    assert "add" in [op_name(n) for n in amp_model.graph.nodes]
    assert torch.equal(amp_model(X), filled(X))


def test_what_the_caller_gets_is_no_input() -> None:
    for function in (lambda x: x + torch.zeros(()), lambda x: (x + torch.zeros(())).flatten().view(-1)):
        amp_model = autocastfx.convert(Function(function), (X,))
        assert amp_model(X).data_ptr() != X.data_ptr()
