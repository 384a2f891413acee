"""Padded places of torch's encoders: its fast path leaves 0 there, the graph computes them, and that is told."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import StateWarning

X = torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8)
PADDED = torch.tensor([[False, False, False, True], [False, False, True, True]])


def encoder(*, nested: bool = True, first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested).eval()


class Inside(nn.Module):
    """An encoder that the caller's arguments do not name."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.encoder, self.given = encoder(), given

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        found: Tensor = self.encoder(x, src_key_padding_mask=padded if self.given else None)
        return found.masked_fill(padded[..., None], 0.0)


def told(model: nn.Module, *args: Any, check: bool = False) -> tuple[autocastfx.AmpModule, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        amp_model = autocastfx.convert(model, args, dtype="bfloat16", check=check)
    return amp_model, [str(one.message) for one in caught]


def test_padded_places_that_torch_may_leave_0_are_told_and_else_the_graph_is_the_model() -> None:
    model = encoder()
    amp_model, said = told(model, X, None, PADDED, check=True)  # the check finds nothing else
    assert len(said) == 1
    assert "computes the padded places of an nn.TransformerEncoder's output, as torch does in training" in said[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        theirs, ours = model(X, src_key_padding_mask=PADDED), amp_model(X, src_key_padding_mask=PADDED)
    assert not theirs[PADDED].any(), "torch's own"
    assert ours[PADDED].all()
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(ours[~PADDED], theirs[~PADDED], rtol=0.05, atol=0.05)  # a few roundings to bfloat16


def test_an_encoder_inside_a_model_is_told_of_if_it_gets_a_mask() -> None:
    assert len(told(Inside(True), X, PADDED, check=True)[1]) == 1
    assert told(Inside(False), X, PADDED)[1] == []


def test_what_torch_computes_itself_is_not_told() -> None:
    assert told(encoder(nested=False), X, None, PADDED)[1] == []
