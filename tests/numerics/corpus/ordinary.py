"""Ordinary code that is hard to capture."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import images, rows, sequences

__all__ = ["CASES"]

WIDTH = 16


class CausalEncoder(nn.Module):
    """torch's own encoder with a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.encoder(x, mask=mask)


class EncoderDecoder(nn.Module):
    """torch's own transformer with a causal mask of its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.model(x, y, tgt_mask=mask)


class MomentumByData(nn.Module):
    """MoCo: a slow copy of a layer, written through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.data = slow.data * 0.999 + fast.data * 0.001
        return self.fast(x), self.slow(x)


class CodesByData(nn.Module):
    """VQ-VAE: averages and codes written through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("count", torch.full((8,), 500.0))

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x[:, None] - self.codes[None]).pow(2).sum(-1).argmin(-1)
        code = F.embedding(nearest, self.codes)
        if self.training:
            self.count.data.mul_(0.99).add_(F.one_hot(nearest, 8).sum(0), alpha=0.01)
        return self.encode(x + (code - x).detach())


class CumulativeNorm(nn.Module):
    """A batch norm that averages all batches alike: `momentum=None`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class ItemScale(nn.Module):
    """A scale read as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x / self.scale.item())


class LengthFromValues(nn.Module):
    """A length that only values tell."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        place = torch.arange(int(lengths.max()), device=x.device)
        mask = (place[None] < lengths[:, None]).float()
        return self.encode(x) * mask.mean(-1, keepdim=True)


def _measured(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.arange(size) % 5 + 2


POINT = "capture"
CASES = (
    Case("encoder-with-mask", CausalEncoder, sequences(WIDTH), POINT, Demand(14),
         "attention 8, layers 3 + 1 + 2; two norms"),
    Case("transformer-with-mask", EncoderDecoder, lambda n: (torch.randn(2, n, WIDTH), torch.randn(2, 5, WIDTH)), POINT,
         Demand(24), "an encoder of 14, a decoder of two attentions"),
    Case("momentum-by-data", MomentumByData, rows(WIDTH), POINT, Demand(3), "layers 3; the copy is exact"),
    Case("codes-by-data", CodesByData, rows(4), POINT, Demand(3), "encode 3; codes are exact",
         tensors={"buffer count": Demand(0)}),
    Case("cumulative-norm", CumulativeNorm, images(3, 8), POINT, Demand(4, 2.0), "convolution 3, norm 1"),
    Case("scale-by-item", ItemScale, rows(WIDTH), POINT, Demand(3), "encode 3"),
    Case("length-by-values", LengthFromValues, _measured, POINT, Demand(4), "encode 3, weight 1"),
)  # fmt: skip
