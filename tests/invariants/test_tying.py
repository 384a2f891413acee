"""Weight tying kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import autocastfx
from tests.invariants.pair import LOW, Pair, Tied, inserted_casts

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


@pytest.mark.parametrize("low", LOW)
def test_weight_tying_is_kept(low: torch.dtype) -> None:
    i = torch.tensor([[1, 2], [0, 3]])
    pair = Pair.of(Tied(), (i,), low)
    pair.agree(i)
    amp_model: Any = pair.amp_model
    assert amp_model.head.weight is amp_model.embed.weight is pair.original.embed.weight
    assert amp_model.other.bias is amp_model.layer.bias
    assert amp_model.again is amp_model.layer
    assert len(list(amp_model.parameters())) == len(list(pair.original.parameters()))


@pytest.mark.parametrize("low", LOW)
def test_gradients_accumulate_in_tied_weights_and_over_calls(low: torch.dtype) -> None:
    i = torch.tensor([[1, 2], [0, 3]])
    model = Tied()
    amp_model = autocastfx.convert(model, (i,), dtype=low)
    amp_model(i).sum().backward()
    once = model.embed.weight.grad.clone()
    amp_model(i).sum().backward()
    assert torch.equal(model.embed.weight.grad, 2 * once)
    assert (once[4:] != 0).any(), "rows that only the head reads"


@pytest.mark.parametrize("low", LOW)
def test_a_tied_weight_is_cast_once(low: torch.dtype) -> None:
    amp_model = autocastfx.convert(Tied(), (torch.tensor([[1, 2], [0, 3]]),), dtype=low)
    held = amp_model._held()
    reads = Counter(id(held.get(cast.all_input_nodes[0].target)) for cast in inserted_casts(amp_model))
    for name in ("layer.weight", "layer.bias", "other.weight", "head.weight"):
        assert reads[id(held[name])] == 1, name
