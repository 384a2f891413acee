"""How far two models are apart in the log probabilities of tokens; what is counted, and what is refused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import logprob_gap
from autocastfx.numerics.logprob_gap import LogprobGap

VOCABULARY = 16


class Decoder(nn.Module):
    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.shift = shift

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.table(input_ids))
        return logits + self.shift * nn.functional.one_hot(torch.tensor(3), VOCABULARY)


def ids(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, shape)


A, B = Decoder().eval(), Decoder(shift=0.5).eval()


def by_hand(tokens: Tensor, chosen: Tensor) -> Tensor:
    """The gaps of the logits for ``tokens`` of all ``chosen`` that are not -100."""
    with torch.no_grad():
        found = [model(tokens).log_softmax(-1)[..., :-1, :] for model in (A, B)]
    picked = [f.gather(-1, chosen.clamp_min(0)[..., None])[..., 0] for f in found]
    return (picked[0] - picked[1]).abs()[chosen != -100]


def of(gaps: Tensor) -> LogprobGap:
    ordered = gaps.sort().values
    place = math.ceil(0.999 * len(ordered)) - 1
    return LogprobGap(float(gaps.double().mean()), float(ordered[place]), float(gaps.max()), len(gaps))


def near(found: LogprobGap, expected: LogprobGap) -> bool:
    pairs = zip(vars(found).values(), vars(expected).values(), strict=True)
    return all(math.isclose(a, b, rel_tol=8 * torch.finfo(torch.float32).eps, abs_tol=1e-7) for a, b in pairs)


def test_the_next_tokens_of_all_batches_are_compared() -> None:
    runs = [{"input_ids": ids(2, 5)}, (ids(3, 9),), ids(1, 600), ((ids(2, 3),), {"attention_mask": None})]
    shapes = (2, 5), (3, 9), (1, 600), (2, 3)
    expected = of(torch.cat([by_hand(ids(*s), ids(*s)[:, 1:]) for s in shapes]))
    found = logprob_gap(A, B, iter(runs))
    assert near(found, expected)
    assert found.tokens == 8 + 24 + 599 + 4
    assert 0 < found.mean < found.quantile <= found.largest


def test_the_quantile_leaves_out_one_in_a_thousand() -> None:
    tokens = torch.arange(1, 2002)[None]

    def far(x: Tensor) -> Tensor:
        logits = torch.zeros(*x.shape, 2)
        logits[..., 1] += x.float() / 1000
        return logits

    chosen = torch.zeros_like(tokens)
    found = logprob_gap(far, lambda x: torch.zeros(*x.shape, 2), [tokens], chosen=lambda batch: chosen)
    gaps = (far(tokens).log_softmax(-1)[..., 0] + math.log(2)).abs()[0].sort().values
    assert math.isclose(found.quantile, float(gaps[1998]), rel_tol=1e-5)  # ceil(0.999 * 2001) = 1999 of 2001
    assert found.quantile < found.largest


def test_labels_and_masks_say_which_tokens_count() -> None:
    tokens, labels = ids(2, 6), ids(2, 6).clone()
    labels[0, :4] = -100
    assert near(logprob_gap(A, B, [{"input_ids": tokens, "labels": labels}]), of(by_hand(tokens, labels[:, 1:])))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    hidden = tokens.masked_fill(mask == 0, -100)
    for batch in ({"input_ids": tokens, "attention_mask": mask}, (tokens, mask)):
        assert near(logprob_gap(A, B, [batch]), of(by_hand(tokens, hidden[:, 1:])))


def test_chosen_says_which_tokens_these_are() -> None:
    tokens = ids(2, 6)
    found = logprob_gap(A, B, [tokens], chosen=lambda batch: torch.cat([batch[:, 1:], batch[:, :1] * 0 - 100], dim=1))
    assert near(found, of(by_hand(tokens, tokens[:, 1:])))


def test_logits_of_an_encoder_decoder_choose_their_own_labels() -> None:
    def model(input_ids: Tensor, labels: Tensor) -> Any:
        return {"logits": nn.functional.one_hot(labels % 3, 3).float()}

    model.config = SimpleNamespace(is_encoder_decoder=True)  # type: ignore[attr-defined]
    batch = {"input_ids": ids(1, 9), "labels": torch.tensor([[0, 1, 2, -100]])}

    def flat(input_ids: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*labels.shape, 3))

    found = logprob_gap(model, flat, [batch])
    assert found.tokens == 3
    right = 1 - math.log(math.e + 2)
    assert math.isclose(found.mean, right + math.log(3), rel_tol=1e-6)


def test_a_model_is_no_way_from_itself_and_its_random_numbers_are_kept() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.5), nn.Linear(8, VOCABULARY)).train()
    tokens, before = ids(2, 6), torch.get_rng_state()
    assert logprob_gap(model, model, [tokens]) == LogprobGap(0.0, 0.0, 0.0, 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_plain_and_converted_models_mix() -> None:
    model = Decoder().eval()
    low = autocastfx.convert(model, (ids(2, 6),), dtype="bfloat16")
    found = logprob_gap(model, low, [ids(2, 6), ids(1, 9)])
    eps = torch.finfo(torch.bfloat16).eps
    assert 0 < found.mean < found.largest < 8 * eps * 4  # two roundings of logits below 4
    assert found == logprob_gap(low, model, [ids(2, 6), ids(1, 9)])
    assert str(found).startswith(f"log probabilities of 18 tokens: {found.mean:.3g} apart on average, at most ")


def test_log_probabilities_are_float32_whatever_the_logits_are() -> None:
    def wide(x: Tensor) -> Tensor:
        return torch.linspace(0, 8, 7).repeat(*x.shape, 1).bfloat16()

    found = logprob_gap(wide, lambda x: wide(x).float(), [ids(1, 6) % 7])
    assert found.largest == 0


def test_impossible_tokens_are_infinitely_far_apart_unless_for_both() -> None:
    def ban(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape, VOCABULARY).index_fill(-1, torch.tensor([5]), -math.inf)

    tokens = torch.tensor([[0, 5, 5]])
    assert logprob_gap(ban, ban, [tokens]).largest == 0
    assert logprob_gap(ban, A, [tokens]).largest == math.inf


def test_logits_are_freed_with_their_batch() -> None:
    made: list[weakref.ref[Tensor]] = []

    def model(x: Tensor) -> Tensor:
        assert all(ref() is None for ref in made[:-1])  # that of the other model may live
        logits = torch.zeros(*x.shape, VOCABULARY)
        made.append(weakref.ref(logits))
        return logits

    def runs() -> Iterator[Tensor]:
        for _ in range(3):
            yield ids(2, 6)
            assert all(ref() is None for ref in made)

    logprob_gap(model, model, runs())
    assert len(made) == 6


IDS = ids(2, 6)
Act = Callable[[], object]
WRONG: dict[str, tuple[Act, type[Exception], str]] = {
    "one batch": (lambda: logprob_gap(A, B, IDS), TypeError, r"batches is an iterable of batches, not a Tensor; write"),
    "no batch": (
        lambda: logprob_gap(A, B, []),
        ValueError,
        r"there are no batches .* An iterator can be read only once",
    ),
    "no logits": (
        lambda: logprob_gap(A, lambda input_ids: (A(input_ids),), [IDS]),
        TypeError,
        r"batch 1: b returns no logits but a tuple: return a tensor of shape \(\.\.\., tokens, vocabulary\)",
    ),
    "integers": (
        lambda: logprob_gap(lambda x: x, B, [IDS]),
        TypeError,
        r"batch 1: a returns no logits but a tensor of in",
    ),
    "two shapes": (
        lambda: logprob_gap(A, lambda x: A(x)[..., :5], [IDS]),
        ValueError,
        r"batch 1: a gives logits of shape \(2, 6, 16\), and b of \(2, 6, 5\)\.",
    ),
    "no tokens": (
        lambda: logprob_gap(lambda x: x, lambda x: x, [(torch.ones(2, 6, 4),)]),
        ValueError,
        r"batch 1: no labels, no input_ids, and 0 integer inputs: give chosen=",
    ),
    "several": (
        lambda: logprob_gap(lambda x, y: A(x), lambda x, y: B(x), [(IDS, IDS + 0)]),
        ValueError,
        r"batch 1: no labels, no input_ids, and 2 integer inputs: give chosen=",
    ),
    "another length": (
        lambda: logprob_gap(A, B, [IDS, IDS], chosen=lambda batch: batch[:, 1:]),
        ValueError,
        r"batch 1: the chosen tokens have shape \(2, 5\), and the logits that choose them \(2, 6, 16\)",
    ),
    "no integers": (
        lambda: logprob_gap(A, B, [IDS], chosen=lambda batch: batch.float()),
        TypeError,
        r"batch 1: chosen returns an integer tensor, not a tensor of float32\[2, 6\]",
    ),
    "beyond": (
        lambda: logprob_gap(A, B, [IDS, IDS], chosen=lambda batch: batch + 16),
        ValueError,
        r"batch 1: token \d+ is not in the vocabulary of 16 logits",
    ),
    "none counts": (
        lambda: logprob_gap(A, B, [{"input_ids": IDS, "labels": IDS * 0 - 100}]),
        ValueError,
        r"no token of the batches counts: all are -100, or hidden",
    ),
    "NaN": (
        lambda: logprob_gap(A, lambda x: A(x) * math.nan, [IDS]),
        ValueError,
        r"batch 1: log probabilities of b are NaN\. find_overflow names",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=list(WRONG))
def test_what_cannot_be_compared_is_refused(case: tuple[Act, type[Exception], str]) -> None:
    act, error, message = case
    with pytest.raises(error, match=f"^{message}"):
        act()
