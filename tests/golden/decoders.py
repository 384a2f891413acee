"""How each family of decoders calls attention once it is converted."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import autocastfx
from autocastfx import AmpModule
from autocastfx.graph.names import op_name
from benchmarks.models.decoders import DECODERS, IDS

KEPT = Path(__file__).with_name("decoders.txt")


def attention(name: str) -> str:
    """The calls in one layer of a decoder."""
    amp_model = autocastfx.convert(DECODERS[name](), (), {"input_ids": IDS}, dtype=torch.bfloat16)
    return shown_attention(amp_model)


def attentions() -> str:
    """Those of all, as they are kept."""
    return "\n".join(f"{name}:\n{attention(name)}\n" for name in DECODERS)


def shown_attention(amp_model: AmpModule) -> str:
    """The attention of the converted graph as code, and whatever compares, which masks are made by.

    Names are without numbers, which count what a version of transformers calls before.
    """
    kinds = ("scaled_dot_product_attention", "le", "lt", "ge", "gt", "__and__", "where", "tril", "triu")
    nodes = [node for node in amp_model.graph.nodes if node.op == "call_function" and op_name(node) in kinds]
    shown = "\n".join(f"{node.target}{node.args} {dict(node.kwargs)}" for node in nodes)
    return re.sub(r"(?<=[a-z])_\d+(?=[_,)\s])", "", shown)
