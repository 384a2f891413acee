"""Residual streams: a float32 sum that many branches add to, each a small part of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import images, mean_square, mlp, sequences, tokens

__all__ = ["CASES"]

WIDTH = 16


class EmbeddedStream(nn.Module):
    """A deep stream that starts as rows of an embedding: under torch.autocast it is float32."""

    depth = 12

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(self.depth))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.depth))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        start = stream = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            stream = stream + 0.01 * layer(norm(stream))
        return stream, stream - start


class RootNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class T5Stream(EmbeddedStream):
    """T5: root-mean-square norms, gated layers, a stream of large embeddings."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.embed.weight, std=30.0)
        self.norms = nn.ModuleList(RootNorm() for _ in range(self.depth))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.depth))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        start = stream = self.embed(ids)
        for norm, layer, gate in zip(self.norms, self.layers, self.gates, strict=True):
            x = norm(stream)
            stream = stream + F.gelu(gate(x), approximate="tanh") * layer(x)
        return stream, stream - start


class LearnedPositions(EmbeddedStream):
    """PatchTST: a stream that starts where learned positions are added to what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(12, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start = stream = self.embed(x) + self.positions[: x.shape[1]]
        for layer in self.layers:
            stream = stream + 0.01 * layer(stream).tanh()
        return stream, stream - start


class AffineStream(nn.Module):
    """MobileBERT: in place of each norm a scale and a bias, so that sums of branches are never normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.scales = nn.ParameterList(1 + 0.1 * torch.randn(WIDTH) for _ in range(8))
        self.biases = nn.ParameterList(0.1 * torch.randn(WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        stream = x
        for layer, scale, bias in zip(self.layers, self.scales, self.biases, strict=True):
            stream = (0.1 * layer(stream) * scale + bias) + stream
        return stream


class LayerScale(EmbeddedStream):
    """CaiT and ViT: branches scaled by a parameter of 1e-4, on a stream that starts as an input."""

    depth = 8

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((WIDTH,), 1e-4) for _ in range(self.depth))
        self.embed = nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.embed(x)
        for norm, layer, scale in zip(self.norms, self.layers, self.scales, strict=True):
            stream = stream + scale * layer(norm(stream))
        return stream, stream - x


class ReZero(nn.Module):
    """Branches behind gates that start at a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.gates = nn.Parameter(torch.full((6,), 0.01))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = x
        for i, layer in enumerate(self.layers):
            stream = stream + self.gates[i] * torch.tanh(layer(stream))
        return stream, stream - x


class Highway(nn.Module):
    """Gates that mostly carry: sigmoid of -5."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -5.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = x
        for gate, layer in zip(self.gates, self.layers, strict=True):
            carry = torch.sigmoid(gate(stream))
            stream = stream + carry * (torch.tanh(layer(stream)) - stream)
        return stream, stream - x


class ConvStream(nn.Module):
    """A residual denoiser: the network gives a small correction of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = 0.02 * self.last(torch.tanh(self.norm(self.first(x))))
        return x - noise, noise


class Block(nn.Module):
    """A pre-norm transformer block without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.layers(self.second(x))


class Transformer(nn.Module):
    """Embedding, two blocks, a tied head: an ordinary language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class PostNorm(nn.Module):
    """BERT: each sum goes through a layer norm, which starts the next stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(mlp(WIDTH, 32, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x))
        return x


class LastNorm(EmbeddedStream):
    """GPT-2's end: a norm of the stream, whose weight and bias gather the gradients of all rows, and a tied head."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        stream, _ = super().forward(ids)
        return F.linear(self.last(stream), self.embed.weight) + 0.5


class Decoder(nn.Module):
    """A pyramid whose levels are summed over skips, starting from the picture itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 3, 3, stride=2, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        coarse = F.interpolate(self.up(self.down(x)), scale_factor=2.0, mode="bilinear")
        detail = x - F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0, mode="bilinear")
        return detail + 0.1 * coarse, detail


POINT = "provenance"
STREAM = "a branch has 4 roundings (layer 3, scaling 1)"
GONE = {"output 1": Demand(6)}
CASES = (
    Case("stream-from-embedding", EmbeddedStream, tokens(50), POINT, Demand(5, 0.1, 1.0),
         f"{STREAM} and its norm 1; a tenth is added",
         tensors=GONE),
    Case("t5-stream", T5Stream, tokens(50), POINT, Demand(7, 0.1, 2.0),
         "norm 1, products 3, gelu 1, product 1, sum 1; a twentieth is added",
         tensors={"output 1": Demand(7)}),
    Case("learned-positions", LearnedPositions, sequences(WIDTH), POINT, Demand(5, 1.0, 1.0),
         f"embedding 3; {STREAM} and tanh 1; a tenth is added", tensors=GONE),
    Case("affine-stream", AffineStream, sequences(WIDTH), POINT, Demand(5, 0.3, 1.0),
         "layer 3, scaling 2; a quarter is added"),
    Case("layer-scale", LayerScale, sequences(WIDTH), POINT, Demand(5, 1e-3, 1.0),
         f"{STREAM} and its norm 1; a thousandth is added",
         tensors=GONE),
    Case("re-zero", ReZero, sequences(WIDTH), POINT, Demand(5, 0.04, 1.0),
         f"{STREAM}, tanh 1; six hundredths of a half are added",
         tensors=GONE),
    Case("highway", Highway, sequences(WIDTH), POINT, Demand(6, 0.05, 3.0),
         "gate 3, sigmoid 1, layer 3, tanh 1, product 1; a thirtieth changes; gates stand at -5, in an exponent",
         tensors={"output 1": Demand(9, 3.0)}),
    Case("denoiser", ConvStream, images(3, 8), POINT, Demand(8, 0.02, 1.5),
         "convolutions 3 + 2, norm 1, tanh 1, scaling 1; a fiftieth",
         tensors={"output 1": Demand(8), **{f"buffer norm.running_{name}": Demand(3) for name in ("mean", "var")}}),
    Case("transformer", Transformer, tokens(50), POINT, Demand(12),
         "two blocks add branches of 8, the head 2, the norm 1"),
    Case("post-norm", PostNorm, tokens(50), POINT, Demand(10),
         "three times a branch of 6 beside the stream, and a norm"),
    Case("post-norm-of-many-rows", PostNorm, tokens(50), "gradients", Demand(10),
         "three times a branch of 6 beside the stream, and a norm; sums over rows are exact", sizes=(1000, 1500),
         loss=mean_square),
    Case("last-norm-of-many-rows", LastNorm, tokens(50), "gradients", Demand(6),
         "stream and norm 1, head 3, sum 1; branches add little; sums over rows are exact", sizes=(1000, 1500),
         loss=mean_square),
    Case("detail-pyramid", Decoder, images(3, 16), POINT, Demand(7, 0.1, 1.0),
         "convolutions 3 + 2, upsampling 1, scaling 1; a tenth",
         tensors={"output 1": Demand(0)}),
)  # fmt: skip
