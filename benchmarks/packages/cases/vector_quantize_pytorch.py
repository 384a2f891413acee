"""vector-quantize-pytorch: codebooks that forward updates, straight-through gradients, and codes without a codebook."""

from __future__ import annotations

from typing import Any

import torch
import vector_quantize_pytorch as vq
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


class Autoencoder(nn.Module):
    def __init__(self, quantize: nn.Module) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.quantize = quantize
        self.decode = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        quantized, *rest = self.quantize(self.encode(x))
        return self.decode(quantized), *rest


def _inputs() -> Given:
    return (torch.randn(4, 10, 12),), {}


def _loss(output: Any, given: Given) -> Tensor:
    restored, *rest = output
    extra = [one.float().sum() for one in rest if one.is_floating_point()]
    return (restored - given[0][0]).square().mean() + sum(extra, torch.zeros(()))


def _case(name: str, quantize: Any) -> Case:
    return Case(name, lambda: Autoencoder(quantize()).train(), _inputs, _loss)


CASES = (
    _case("VectorQuantize", lambda: vq.VectorQuantize(16, 32)),
    _case("VectorQuantize, cosine", lambda: vq.VectorQuantize(16, 32, use_cosine_sim=True, threshold_ema_dead_code=2)),
    _case(
        "VectorQuantize, learned",
        lambda: vq.VectorQuantize(16, 32, learnable_codebook=True, ema_update=False, rotation_trick=True),
    ),
    _case("ResidualVQ", lambda: vq.ResidualVQ(dim=16, codebook_size=32, num_quantizers=3)),
    _case("FSQ", lambda: vq.FSQ([8, 5, 5], dim=16)),
)
