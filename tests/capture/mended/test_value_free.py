"""torch's own modules whose Python code reads values: captured, with the results of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

import autocastfx
from tests.helpers import sampled
from tests.invariants.pair import LOW, Net, Pair, net

WIDTH = 16
detect = transformer._detect_is_causal_mask


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _causal(m: Net, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return m.encoder(x, mask=mask)


def _other_mask(m: Net, x: Tensor) -> Tensor:
    """It hides what follows, and the first token from all but itself: it must not be taken for the causal one."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    mask[1:, 0] = float("-inf")
    return m.encoder(x, mask=mask)


def _said_to_be_causal(m: Net, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return m.encoder(x, mask=mask, is_causal=True)


def _targets(m: Net, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return m.transformer(x, x * 0.5, tgt_mask=mask)


@pytest.mark.parametrize("low", sampled(LOW, lambda _, low: low is torch.bfloat16))
@pytest.mark.parametrize("function", [_causal, _other_mask, _said_to_be_causal, _targets])
def test_masks_of_transformers(function: object, low: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    held = {"transformer": whole} if function is _targets else {"encoder": encoder()}
    pair = Pair.of(net(function, **held), (torch.randn(2, 5, WIDTH),), low)
    for mode in (True, False):
        for size in (5, 7):
            pair.train(mode).agree(torch.randn(2, size, WIDTH), backward=mode)
    assert transformer._detect_is_causal_mask is detect


def test_a_mask_given_as_an_argument_is_that_of_each_call() -> None:
    pair = Pair.of(
        net(lambda m, x, mask: m.encoder(x, mask=mask), encoder=encoder()),
        (torch.randn(2, 5, WIDTH), nn.Transformer.generate_square_subsequent_mask(5)),
        torch.bfloat16,
    )
    for hidden in (1, 3):
        mask = torch.zeros(5, 5)
        mask[:, -hidden:] = float("-inf")
        pair.agree(torch.randn(2, 5, WIDTH), mask)


@pytest.mark.parametrize("low", LOW)
def test_batch_norm_that_averages_all_batches_alike(low: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, momentum=None)
    pair = Pair.of(net(lambda m, x: m.b(m.norm(m.a(x))), norm=norm), (torch.randn(6, 8),), low)
    for size in (6, 8, 6):
        pair.train(True).agree(torch.randn(size, 8))
        pair.train(False).agree(torch.randn(size, 8))
    assert norm.num_batches_tracked == 3
    assert norm.running_mean is not None
    assert norm.running_mean.dtype == torch.float32


def test_its_averages_are_those_of_float32() -> None:
    """What bfloat16 would round away: of inputs that it holds, means and variances in float32."""
    norm, expected = nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, momentum=None)
    amp_model = autocastfx.convert(norm, (torch.randn(6, 4),), dtype=torch.bfloat16)
    for _ in range(3):
        x = torch.randn(7, 4).bfloat16().float()
        amp_model(x)
        expected(x)
        torch.testing.assert_close(dict(norm.named_buffers()), dict(expected.named_buffers()))
