"""What capture takes out: values that are settled before any input is known, and what they make needless."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.graph.alias import seen_by_functions
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument
from benchmarks.models.decoders import DECODERS, IDS, WINDOW
from tests.golden import decoders
from tests.golden.decoders import shown_attention
from tests.helpers import Function, relative_error, sampled
from tests.nearness import assert_as_near_as_autocast

X, SEEN = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(2, 5, dtype=torch.bool)


def ops(function: Callable[..., object], *inputs: Tensor) -> list[str]:
    """The computing ops of what is captured, which gives what ``function`` gives."""
    amp_model = autocastfx.convert(
        Function(function), inputs, op_list=autocastfx.OpList(unlisted="keep"), dtype="float16"
    )
    torch.testing.assert_close(amp_model(*inputs), function(*inputs), rtol=0, atol=0)
    return [op_name(n) for n in amp_model.graph.nodes if n.op == "call_function" and "size" not in op_name(n)]


def trivial(length: int | torch.SymInt) -> Tensor:
    """A mask that shows all, as a model may build it."""
    position = torch.arange(length) + 0
    shown = torch.ones((), dtype=torch.bool) & (position[None, None, :, None] >= 0)
    return torch.where(shown, torch.zeros(()), torch.finfo(torch.float32).min)


def test_a_mask_that_shows_all_is_not_added() -> None:
    assert ops(lambda x: (x + trivial(x.shape[2])).softmax(-1), X) == ["softmax"]


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
    return (torch.zeros(2, 3, 4, 5) + x.exp().mT).view(2, -1).exp()  # what is given out would stay anyway


def strided(x: Tensor) -> Tensor:
    return (torch.zeros(2, 3, 4, 5) + x.exp().mT).as_strided((4, 4), (4, 1)).exp()


KEPT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a mask that hides": (lambda x: (x.exp() + torch.where(torch.arange(5) >= 1, 0.0, -1.0)[:, None]).exp(), "add"),
    "a mask that is written to": (written, "add"),
    "strides, for a view": (viewed, "add"),
    "strides": (strided, "add"),
    "a number that is cut": (lambda x: (x > 0) & (torch.full((), 0.5, dtype=torch.long) > 0), "__and__"),
    "a number that wraps": (lambda x: (x > 0) & (torch.zeros((), dtype=torch.uint8) > -1), "__and__"),
    "bits that are read anew": (
        lambda x: x.exp() + torch.zeros((), dtype=torch.int32).view(torch.float32),
        "add",
    ),
    "a dtype that widens": (lambda x: ((x > 0).int() + torch.zeros(())).exp(), "add"),
    "a shape that widens": (lambda x: (x[:1].exp() + torch.zeros(2, 1, 1, 1)).exp(), "add"),
    "bits": (lambda x: (x > 0).int() & torch.ones((), dtype=torch.int32), "__and__"),
    "what is written to": (lambda x: (x.exp() + torch.zeros(())).mul_(2) + x.exp(), "add"),
    "zeros that a sum begins with": (lambda x: (x.exp() + torch.zeros(2, 3, 5, 4)).exp(), "add"),
    "zeros that a sum of numbers begins with": (lambda x: (x.mean() + torch.zeros(())).exp(), "add"),
    "scores that are read otherwise, too": (lambda x: (s := x + torch.zeros(5, 1)).softmax(-1) * s, "add"),
    "ones are no zeros": (lambda x: (x.exp() + torch.ones(())).exp(), "add"),
    "zero minus": (lambda x: (torch.zeros(()) - x.exp()).exp(), "sub"),
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
    amp_model = autocastfx.convert(Function(filled), (X,), op_list=lists, dtype="float16")
    assert "add" in [op_name(n) for n in amp_model.graph.nodes]
    assert torch.equal(amp_model(X), filled(X))


def read_there(x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    with torch.no_grad():
        scale = (x + zeros).softmax(-1) * 0.5
    return (x + zeros).softmax(-1) * scale


def written_there(x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    same = zeros[:]
    with torch.no_grad():
        zeros.add_(1)
    return (x + same).exp()


def given_on_from_there(x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    with torch.no_grad():
        flat, half = zeros.view(-1), x * 0.5
    flat.add_(1)
    return (x + zeros).exp() * half


@pytest.mark.parametrize(
    ("function", "stays"), [(read_there, False), (written_there, True), (given_on_from_there, True)]
)
def test_a_region_without_gradients_is_looked_into(function: Callable[[Tensor], Tensor], stays: bool) -> None:
    """A tensor that it only reads is settled all the same."""
    assert ("add" in ops(function, X)) is stays
    captured: Any = autocastfx.convert(Function(function), (X,), dtype="float16").variants[0].captured
    (zeros,) = (node for node in captured.graph.nodes if op_name(node) == "zeros_like")
    assert (zeros in seen_by_functions(captured.graph, captured.attributes)) is stays


def test_what_the_caller_gets_is_no_input() -> None:
    for function in (lambda x: x + torch.zeros(()), lambda x: (x + torch.zeros(())).flatten().view(-1)):
        amp_model = autocastfx.convert(Function(function), (X,), dtype="float16")
        assert amp_model(X).data_ptr() != X.data_ptr()


# ---- attention ------------------------------------------------------------------------------------------------------

Q, KV = (torch.randn(2, 3, n, 4, generator=torch.Generator().manual_seed(n)) for n in (5, 5))
LONGER = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(7))
LEAST = torch.finfo(torch.float32).min


def attention(mask: Callable[..., Tensor | None], *inputs: Tensor) -> tuple[Any, Any, autocastfx.AmpModule]:
    """The mask of the converted attention, whether it is causal, and the model, which gives what torch gives."""

    def attend(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
        made = mask(q, k, *others)
        return functional.scaled_dot_product_attention(q, k, k, attn_mask=made)

    amp_model = autocastfx.convert(
        Function(attend), inputs, op_list=autocastfx.OpList(unlisted="keep"), dtype="float16"
    )
    for q, k, *others in (inputs, (inputs[0][:1], inputs[1][:1], *inputs[2:])):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k)]
        found, expected = (
            (*torch.autograd.grad(result.square().sum(), leaves), result.detach())
            for result in (amp_model(*leaves, *others), attend(*leaves, *others))
        )
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps
    (node,) = (n for n in amp_model.graph.nodes if op_name(n) == "scaled_dot_product_attention")
    return argument(node, "attn_mask"), argument(node, "is_causal"), amp_model


def before(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[2])[None, :] <= torch.arange(q.shape[2])[:, None]


def windowed(q: Tensor, k: Tensor, width: int = 6) -> Tensor:
    return before(q, k) & (torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] - width)


CAUSAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "positions": before,
    "a triangle": lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(),
    "what is above it": lambda q, k: ~torch.ones(q.shape[2], k.shape[2]).triu(1).bool(),
    "scores of torch's transformer": lambda q, k: torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(1),
    "scores of finfo.min": lambda q, k: torch.where(before(q, k), 0.0, LEAST)[None, None].expand(len(q), 1, -1, -1),
    "and with all": lambda q, k: before(q, k) & torch.ones(k.shape[2], dtype=torch.bool),
}


@pytest.mark.parametrize("keys", [KV, LONGER], ids=["as many keys", "more keys"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_of_what_comes_later_becomes_is_causal(name: str, keys: Tensor) -> None:
    mask, is_causal, _ = attention(CAUSAL[name], Q, keys)
    assert (mask, is_causal) == (None, True)


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one key later": lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1),
    "one key less": lambda q, k: torch.ones(q.shape[2], k.shape[2]).tril(-1) + before(q, k)[:1] > 0,
    "what comes before": lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(),
    "counted from the end": lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - 5),
    "the same bias everywhere": lambda q, k: torch.full((q.shape[2], k.shape[2]), -2.0),
    "a finite bias": lambda q, k: torch.where(before(q, k), 0.0, -10.0),
    "a bias of what is shown": lambda q, k: torch.where(before(q, k), 1.0, float("-inf")),
    "a window that hides": lambda q, k: windowed(q, k, 2),
    "the keys alone": lambda q, k: torch.arange(k.shape[2])[None] <= 2,
    "another dimension": lambda q, k: (torch.arange(len(q))[:, None] + 1 >= torch.arange(k.shape[2]))[:, None, None],
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_anything_else_stays(name: str) -> None:
    mask, is_causal, _ = attention(MASKED[name], Q, LONGER if name == "counted from the end" else KV)
    assert mask is not None
    assert not is_causal


def test_a_mask_that_the_caller_gives_stays() -> None:
    def padded(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return before(q, k) & seen[:, None, None, :]

    mask, is_causal, _ = attention(padded, Q[:1], KV[:1], torch.ones(1, 5, dtype=torch.bool))
    assert mask is not None
    assert not is_causal


def test_one_query_after_a_cache_sees_all_keys() -> None:
    def behind(q: Tensor, k: Tensor) -> Tensor:
        return torch.arange(k.shape[2])[None, :] <= torch.arange(1)[:, None] + k.shape[2] - 1

    mask, is_causal, _ = attention(behind, Q[:, :, :1], KV)
    assert (mask, bool(is_causal)) == (None, False)


def test_a_window_counts_where_it_hides_something() -> None:
    """Up to its length a causal mask hides as much: another graph is for longer inputs."""

    mask, is_causal, amp_model = attention(windowed, Q, KV)
    assert (mask, is_causal) == (None, True)
    for length in (6, 3, 7, 20):
        q, k = torch.randn(2, 1, 3, length, 4)
        expected = functional.scaled_dot_product_attention(q, k, k, attn_mask=windowed(q, k))
        assert relative_error(amp_model(q, k), expected) <= 16 * torch.finfo(torch.float32).eps


# ---- transformers ---------------------------------------------------------------------------------------------------


OFTEN = ("gpt2", "llama", "mistral", "gemma3", "phi3", "cohere")
LENGTHS = [(7, WINDOW), pytest.param((1, WINDOW + 9, 300, 4096), marks=pytest.mark.slow)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", sampled(DECODERS, lambda _, name: name in OFTEN))
def test_a_decoder_calls_attention_without_a_mask(name: str, lengths: tuple[int, ...]) -> None:
    """It is as exact as under torch.autocast, in its results and in its gradients."""
    model = DECODERS[name]()
    amp_model = autocastfx.convert(model, (), {"input_ids": IDS}, dtype=torch.bfloat16)
    assert f"{name}:\n{shown_attention(amp_model)}\n" in decoders.KEPT.read_text(encoding="utf-8")
    for length in lengths:
        ids = torch.randint(32, (1, length), generator=torch.Generator().manual_seed(length))
        assert_as_near_as_autocast(partial(_outcome, ids=ids), model, amp_model, torch.bfloat16, times=2)


def _outcome(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradients of all parameters, as one."""
    logits = model(input_ids=ids).logits.float()
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    return {"logits": logits.detach(), "gradients": torch.cat([g.flatten() for g in gradients if g is not None])}
