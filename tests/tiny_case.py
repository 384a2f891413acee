"""A model to tune that trains in milliseconds, for tests of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tune_models import Case

__all__ = ["TINY", "Classifier", "batches"]


class Classifier(nn.Sequential):
    """Logits of four classes. Norms are what the default list keeps in float32."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(64, 16, generator=generator)
        yield x, x[:, :4].argmax(1)


def _loss(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


TINY = Case(Classifier, batches, _loss, lambda batch: batch[0])
