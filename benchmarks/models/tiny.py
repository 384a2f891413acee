"""Modules of a few layers, written by hand: what most dumps in tests show."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Convolution, batch norm, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.bn(self.conv(images))), 2)
        return self.fc(F.adaptive_avg_pool2d(features, 1).flatten(1))


class EncoderLayer(nn.Module):
    """One transformer layer with attention written out and a mask that is added to the scores."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self._split(part) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask
        attended = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + self.dropout(self.out(attended)))
        return self.norm2(x + self.dropout(self.mlp(x)))

    def _split(self, part: Tensor) -> Tensor:
        return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class NoGrad(nn.Module):
    """A region without gradients, which export keeps as a graph of its own, and casts that the model makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("weights", torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = torch.softmax(self.teacher(x), dim=-1)
        logits = self.student(x)
        weighted = logits.float().log_softmax(-1) * target * self.weights
        return {"logits": logits, "loss": weighted.sum(-1), "labels": labels.clone(), "exact": x.double().mean()}


class Attention(nn.Module):
    """Query, key and value of one value, and an output layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 50)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (part(normed).unsqueeze(1) for part in (self.q, self.k, self.v))
        return self.head(self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1)))
