"""Structure: what goes in and comes out, by name, in place, shared or missing."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.numerics.corpus.case import Call, Case, Demand
from tests.numerics.corpus.parts import images, rows, sequences, tokens

__all__ = ["CASES"]

WIDTH = 16


class Prediction(NamedTuple):
    boxes: Tensor
    scores: Tensor


class DictOut(nn.Module):
    """DETR's results: a dictionary of predictions, and one for each layer below."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.boxes, self.classes = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, object]:
        below: list[dict[str, Tensor]] = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            below.append({"boxes": self.boxes(x).sigmoid(), "classes": self.classes(x)})
        return {**below[-1], "below": below[:-1], "count": len(below), "none": None}


class NamedOut(nn.Module):
    """A named tuple, and a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.scores = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Prediction, str]:
        return Prediction(self.boxes(x), self.scores(x).squeeze(-1)), "boxes"


class OrderedOut(nn.Module):
    """Torchvision's ordered features, some of which are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        low = torch.tanh(self.first(x))
        high = self.second(low)
        return OrderedDict([("low", low), ("high", high), ("out", high), ("input", x)])


class ByName(nn.Module):
    """Arguments by name, some None, some with defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None, scale: float = 0.25
    ) -> Tensor:
        memory = x if memory is None else memory
        scores = self.query(x) @ memory.transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ self.value(memory)


class FilledInput(nn.Module):
    """An input that the model fills: a cache of keys in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        key = self.key(x)
        with torch.no_grad():
            cache[:, : x.shape[1]].copy_(key)
        return key.sum(-1)


class ScaledInput(nn.Module):
    """An input that is changed in place before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean(0)).div_(x.std(0) + 1e-6)
        return self.encode(x)


class InPlaceViews(nn.Module):
    """Writes into slices of a tensor that a layer made, and of one made of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        table = torch.zeros(x.shape[0], 2 * WIDTH, device=x.device)
        table[:, :WIDTH] = x
        table[:, WIDTH:] = z
        table[:, 0] += 1000.25
        return table, z


class Tied(nn.Module):
    """An embedding that is also the head, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(2):
            x = x + torch.tanh(self.layer(x))
        return self.head(x)


class IntegersOut(nn.Module):
    """Integer and boolean results beside a floating one."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encode(x), (x > 0.5).any(-1), x.argsort(-1)


class NestedInputs(nn.Module):
    """Lists and dictionaries of tensors as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("text", "image")})

    def forward(self, parts: dict[str, Tensor], extra: list[Tensor]) -> Tensor:
        total = sum((self.mix[name](part) for name, part in parts.items()), torch.zeros((), device=extra[0].device))
        return total + extra[0] * 100 + extra[1]


class Recurrent(nn.Module):
    """A GRU whose last state is returned beside all of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        for i in range(4):
            state = self.cell(x[:, i], state)
            found.append(state)
        return torch.stack(found, 1), state


class ModeDependent(nn.Module):
    """Other results in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.side = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.training:
            return self.head(x), self.side(x)
        return self.head(x).softmax(-1)


class LoopOverLength(nn.Module):
    """Python code that depends on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            total = total * 0.5 + self.encode(x[:, i])
        return total / x.shape[1]


def _cached(size: int) -> Call:
    return Call((torch.randn(2, size, WIDTH),), {"cache": torch.zeros(2, 16, WIDTH)})


def _named(size: int) -> dict[str, object]:
    mask = torch.rand(2, 1, size) < 0.8
    mask[..., 0] = True
    return {"x": torch.randn(2, size, WIDTH), "mask": mask, "memory": None}


def _nested(size: int) -> tuple[object, ...]:
    parts = {name: torch.randn(size, WIDTH) for name in ("text", "image")}
    return parts, [torch.randn(size, WIDTH), torch.randn(WIDTH)]


POINT = "structure"
CASES = (
    Case("dictionary-out", DictOut, rows(WIDTH), POINT, Demand(8), "layers 3 + 1 + 2, heads 2"),
    Case("named-tuple-out", NamedOut, rows(WIDTH), POINT, Demand(3), "heads 3"),
    Case("ordered-features", OrderedOut, images(3, 6), POINT, Demand(6), "convolutions 3 + 2, tanh 1"),
    Case("arguments-by-name", ByName, _named, POINT, Demand(8, 2.0),
         "query 3, scores 2, scaling 1, softmax 1, product 2"),
    Case("filled-input", FilledInput, _cached, POINT, Demand(3), "key 3; the cache is float32"),
    Case("scaled-input", ScaledInput, rows(WIDTH), "provenance", Demand(3), "encode 3; the input is exact",
         tensors={"input 0": Demand(0)}),
    Case("writes-into-views", InPlaceViews, rows(WIDTH), "provenance", Demand(3, 1e-3, 1.0),
         "encode 3, beside a column of a thousand", tensors={"output 1": Demand(3)}),
    Case("tied-weights", Tied, tokens(50), POINT, Demand(9), "layers 3 + 1 + 2 + 1, head 2"),
    Case("integers-out", IntegersOut, rows(WIDTH), POINT, Demand(3), "encode 3; integers are exact"),
    Case("nested-inputs", NestedInputs, _nested, "provenance", Demand(3, 0.02, 1.0),
         "mix 3, a hundredth of the result"),
    Case("recurrent-cell", Recurrent, lambda n: (torch.randn(n, 4, WIDTH), torch.zeros(n, WIDTH)), POINT,
         Demand(8, 2.0),
         "products 3, gates 3, state 2; four steps, of which each keeps a half"),
    Case("other-in-training", ModeDependent, rows(WIDTH), POINT, Demand(4), "head 3, softmax 1"),
    Case("loop-over-length", LoopOverLength, sequences(WIDTH), POINT, Demand(5), "encode 3, sum 1, division 1",
         sizes=(3, 5)),
)  # fmt: skip
