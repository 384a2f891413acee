"""Islands that a model writes itself: what it asks to be float32 is float32, and its products too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows, sequences

__all__ = ["CASES"]

WIDTH = 16


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 4) / 4)


class FloatOperands(Layered):
    """A product of two `.float()`: its result is float32's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.float()


class FloatRouter(Layered):
    """A mixture's router in float32, as its authors write it: `self.gate(x.float())`."""

    def route(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.T.float())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = self.route(x)
        return self.encode(x) * score.softmax(-1).amax(-1, keepdim=True), score


class ContextIsland(Layered):
    """A `torch.autocast(enabled=False)` region around a product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        with torch.autocast(x.device.type, enabled=False):
            score = x.float() @ self.weight.float()
        return z, score


class NestedIsland(Layered):
    """A region inside a region, and a product after both."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            first = x.float() @ self.weight.float()
            with torch.autocast(x.device.type, enabled=False):
                second = torch.sin(first * 40)
            third = second @ self.weight.float().T
        return first, third, self.encode(third)


class UpcastScores(Layered):
    """Scores of float32 operands before a softmax at a low temperature (`upcast_attention`)."""

    def forward(self, x: Tensor) -> Tensor:
        query = self.encode(x)
        scores = query.float() @ query.float().transpose(-1, -2)
        return (scores * 4).softmax(-1).to(query.dtype) @ x.to(query.dtype)


class UpcastNorm(Layered):
    """Llama's norm: up, and back to the type that came."""

    def norm(self, z: Tensor) -> Tensor:
        kind = z.dtype
        z = z.to(torch.float32)
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)).to(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.encode(x)) @ self.weight


class UpcastStream(Layered):
    """A stream that its model keeps in float32 (`residual_in_fp32`)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = x.to(torch.float32)
        for _ in range(6):
            stream = stream + 0.01 * self.encode(stream).to(torch.float32)
        return stream, stream - x


class FloatState(Layered):
    """A state space step in float32: discretised by an exponent of a float32 parameter."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = -torch.exp(self.weight.float().mean(-1) - 3)
        step = F.softplus(self.encode(x).float())
        for i in range(6):
            state = torch.exp(step[:, i] * decay) * state + step[:, i] * 1e-3 * x[:, i].float()
        return state, state.sum(-1)


class FloatHead(Layered):
    """Logits of a float32 copy of the features: `lm_head(h.float())` under a disabled region."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.encode(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.head(z.float()) * 10


POINT = "islands"
TWO = {"output 1": Demand(0)}
ROUTED = {**TWO, "gradient weight": Demand(3)}
SHARED = "encode 3; the island is exact"
CASES = (
    Case("float-operands", FloatOperands, rows(WIDTH), POINT, Demand(0), "all is float32", ("forward",)),
    Case("float-router", FloatRouter, rows(WIDTH), POINT, Demand(4), "encode 3, weight 1; the router is exact",
         ("route",), ROUTED),
    Case("disabled-region", ContextIsland, rows(WIDTH), POINT, Demand(3), SHARED,
         tensors={**TWO, "gradient weight": Demand(0)}),
    Case("nested-regions", NestedIsland, rows(WIDTH), POINT, Demand(3), SHARED,
         tensors={"output 0": Demand(0), **TWO, "gradient weight": Demand(3, 40.0)}),
    Case("upcast-scores", UpcastScores, sequences(WIDTH), POINT, Demand(6, 4.0),
         "query 3, softmax 1, product 2; scores reach some tens", sizes=(12, 20)),
    Case("upcast-norm", UpcastNorm, rows(WIDTH), POINT, Demand(7), "encode 3, norm 1, product 2"),
    Case("float-stream", UpcastStream, rows(WIDTH), "provenance", Demand(4, 0.06, 1.0),
         "encode 3, scaling 1, six hundredths",
         tensors={"output 1": Demand(4)}),
    Case("float-state", FloatState, lambda n: (torch.randn(n, 6, WIDTH), torch.randn(n, WIDTH)), POINT,
         Demand(3, 0.1, 1.0),
         "encode 3, in steps that change a tenth of the state"),
    Case("float-head", FloatHead, rows(WIDTH), POINT, Demand(4), "encode 3, tanh 1; the head is exact"),
)  # fmt: skip
