"""open_clip_torch: two towers, the contrastive loss of the package, and activation checkpointing."""

from __future__ import annotations

from typing import Any

import open_clip
import torch
from open_clip.coca_model import CoCa
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given

_VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
_TEXT = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}


def _clip() -> Any:
    return open_clip.CLIP(32, dict(_VISION), dict(_TEXT)).train()


def _coca() -> nn.Module:
    decoder = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    vision = {**_VISION, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    model = CoCa(32, decoder, {**_TEXT, "embed_cls": True, "output_tokens": True}, vision).train()
    for name, parameter in model.named_parameters():
        if name.endswith(("cls_emb", "positional_embedding", "text_projection")):  # the package leaves memory as it is
            nn.init.normal_(parameter, std=0.02)
    return model


def _checkpointed() -> nn.Module:
    model = _clip()
    model.set_grad_checkpointing()
    return model


def _pairs() -> Given:
    return (torch.randn(4, 3, 32, 32), torch.randint(1, 64, (4, 16))), {}


def _loss(output: Any, _: Given) -> Tensor:
    image, text, scale = output
    return open_clip.ClipLoss()(image, text, scale)


CASES = (Case("CLIP", _clip, _pairs, _loss, _checkpointed), Case("CoCa", _coca, _pairs))
