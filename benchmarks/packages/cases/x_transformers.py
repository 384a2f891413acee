"""x-transformers: decoders and encoders with the options that change how attention is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper, XTransformer

from benchmarks.packages.case import Case, Given


def _tokens() -> Given:
    return (torch.randint(64, (2, 17)),), {}


def _decoder(**options: Any) -> nn.Module:
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)).train()


def _encoder(**options: Any) -> nn.Module:
    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers).train()


def _masked() -> Given:
    mask = torch.arange(17) < torch.tensor([[17], [9]])
    return (torch.randint(64, (2, 17)),), {"mask": mask}


class Checkpointed(nn.Module):
    """The package has no switch for it; users wrap a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Embedding(64, 32), Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)

    def forward(self, tokens: Tensor) -> Any:
        return checkpoint(self.body, self.first(tokens), use_reentrant=False)


def _seq2seq() -> nn.Module:
    sizes = {"num_tokens": 64, "depth": 1, "heads": 4, "max_seq_len": 32}
    named = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return XTransformer(dim=32, **named).train()


def _pair() -> Given:
    return (torch.randint(64, (2, 12)), torch.randint(64, (2, 17))), {}


def _loss(output: Tensor, _: Given) -> Tensor:
    return output


CASES = (
    Case("decoder", lambda: _decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True), _tokens, _loss),
    Case(
        "encoder with options",
        lambda: _encoder(alibi_pos_bias=True, alibi_num_heads=2, attn_pre_talking_heads=True, attn_sparse_topk=8),
        _masked,
    ),
    Case("encoder and decoder", _seq2seq, _pair, _loss),
    Case(
        "layers",
        lambda: nn.Sequential(nn.Embedding(64, 32), Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)).train(),
        _tokens,
        checkpointed=lambda: Checkpointed().train(),
    ),
)
