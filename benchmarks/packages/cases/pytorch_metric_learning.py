"""pytorch-metric-learning: losses with weights and miners that choose pairs, as parts of a model."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


class Embedded(nn.Module):
    def __init__(self, loss: Any, miner: Any = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))
        self.loss, self.miner = loss, miner

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = self.body(x)
        pairs = () if self.miner is None else (self.miner(found, labels),)
        return self.loss(found, labels, *pairs)


def _inputs() -> Given:
    return (torch.randn(24, 12), torch.arange(24) % 6), {}


def _case(name: str, loss: Any, miner: Any = None) -> Case:
    def build() -> nn.Module:
        return Embedded(loss(), miner() if miner is not None else None).train()

    return Case(name, build, _inputs, lambda output, _: output)


CASES = (
    _case("ArcFaceLoss", lambda: losses.ArcFaceLoss(6, 16)),
    _case("SupConLoss", losses.SupConLoss),
    _case("TripletMarginLoss, mined", losses.TripletMarginLoss, lambda: miners.MultiSimilarityMiner(epsilon=0.5)),
    _case("ProxyAnchorLoss", lambda: losses.ProxyAnchorLoss(6, 16)),
)
