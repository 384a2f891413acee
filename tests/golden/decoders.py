"""How each family of decoders calls attention once it is converted."""

from __future__ import annotations

from pathlib import Path

import torch

import autocastfx
from tests.capture.decoders import DECODERS, IDS, shown_attention

KEPT = Path(__file__).with_name("decoders.txt")


def attention(name: str) -> str:
    """The calls in one layer of a decoder."""
    amp_model = autocastfx.convert(DECODERS[name](), (), {"input_ids": IDS}, dtype=torch.bfloat16)
    return shown_attention(amp_model)


def attentions() -> str:
    """Those of all, as they are kept."""
    return "\n".join(f"{name}:\n{attention(name)}\n" for name in DECODERS)
