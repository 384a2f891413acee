"""Cases that no single graph can hold: Python reads values, leaves torch, or asks autograd in the middle of a forward.

They are no part of the zoo, whose models ``convert`` takes. :mod:`benchmarks.reach` runs them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from benchmarks.models.hand.case import WIDTH, case, linears, rows
from benchmarks.models.zoo import generator


def rescaled_when_large(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    if y.abs().max() > 0.5:
        y = y / y.abs().amax(-1, keepdim=True)
    return self.b(F.gelu(y))


def prints_its_loss(self: Any, x: Tensor) -> dict[str, Tensor]:
    y = self.b(F.gelu(self.a(x)))
    loss = F.mse_loss(y, x)
    print(f"loss {float(loss):.4f}")
    return {"loss": loss, "logits": self.c(y)}


def through_numpy(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    scale = torch.from_numpy(y.detach().float().cpu().numpy().std(axis=-1, keepdims=True))
    return self.b(y / (scale.to(y.device) + 1e-3))


class Prediction:
    """An output class that torch's pytrees do not know."""

    def __init__(self, logits: Tensor, hidden: list[Tensor]) -> None:
        self.logits, self.hidden = logits, hidden

    def to_tuple(self) -> tuple[Tensor, ...]:
        return self.logits, *self.hidden


def own_output_class(self: Any, x: Tensor) -> Prediction:
    hidden = F.gelu(self.a(x))
    return Prediction(self.b(hidden), [hidden])


class Layer(nn.Module):
    """Gives an object of its own to the module around it, after a loop that values end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Prediction:
        for _ in range(2):
            x = F.gelu(self.layer(x))
            if x.abs().max() < 1e-3:
                break
        return Prediction(x, [x * 2])


def own_class_inside(self: Any, x: Tensor) -> Tensor:
    found = self.inner(self.a(x))
    return self.b(found.logits + found.hidden[0])


def as_many_as_needed(self: Any, x: Tensor) -> Tensor:
    """Top-p: as many features as hold most of the weight."""
    weights = self.a(x).float().softmax(-1)
    shares = weights.sort(-1, descending=True).values.cumsum(-1)
    count = int((shares < 0.8).sum(-1).max()) + 1
    values, at = weights.topk(count, -1)
    return self.b(torch.zeros_like(weights).scatter(-1, at, values))


def k_from_a_tensor(self: Any, x: Tensor, k: Tensor) -> Tensor:
    values, _ = self.a(x).topk(k, -1)
    return self.b(x) * values.mean(-1, keepdim=True)


def item_in_arithmetic(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    temperature = y.detach().float().std().item()
    return self.b((y / max(temperature, 0.1)).tanh() * (1 + temperature))


def forces(self: Any, x: Tensor) -> dict[str, Tensor]:
    """An energy of positions, and forces, its gradient."""
    with torch.enable_grad():
        positions = x.detach().requires_grad_()
        energy = self.out(F.silu(self.b(F.silu(self.a(positions))))).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
    return {"energy": energy, "forces": -slope}


def shrunk_until_small(self: Any, x: Tensor) -> Tensor:
    y = x
    while y.norm() > 0.5 * x.norm():
        y = 0.7 * y + 0.1 * torch.tanh(self.a(y))
    return self.b(y)


class SparseExperts(nn.Module):
    """Each token goes to two of four experts, each of which runs on its own tokens alone."""

    def __init__(self, by_mask: bool) -> None:
        super().__init__()
        self.by_mask = by_mask
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True) if self.by_mask else torch.where(chosen == number)
            if token.numel() == 0:
                continue
            found.index_add_(0, token, (expert(flat[token]) * weights[token, rank, None]).to(found.dtype))
        return found.view_as(x)


def experts_by_where(self: Any, x: Tensor) -> Tensor:
    return self.b(x + self.experts(self.a(x)))


def experts_by_nonzero(self: Any, x: Tensor) -> Tensor:
    return self.b(x + self.experts(self.a(x)))


def packed_lstm(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(self.a(x), lengths, batch_first=True, enforce_sorted=False)
    found, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
    return self.b(found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def checkpointed_blocks(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
    return self.a(x)


def checkpointed_reentrant(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
    return self.b(x)


def checkpointed_experts(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(checkpoint(self.experts, y, use_reentrant=False) if self.training else self.experts(y))


class ScaledBlock(Block):
    """Divides by a number that it reads, which breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / max(x.detach().abs().max().item(), 1.0))


def checkpointed_numbers(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(checkpoint(self.block, y, use_reentrant=False) if self.training else self.block(y))


def _blocks() -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(2))


def _lengths(batch: int, size: int) -> dict[str, Any]:
    lengths = torch.randint(2, size + 1, (batch,), generator=generator(batch, size))
    return {**rows(batch, size), "lengths": lengths}


def _with_k(batch: int, size: int) -> dict[str, Any]:
    return {**rows(batch, size), "k": torch.tensor(3)}


_LSTM = partial(nn.LSTM, WIDTH, 8, batch_first=True, bidirectional=True)
CASES = (
    *(case(f) for f in (rescaled_when_large, through_numpy, own_output_class, as_many_as_needed, item_in_arithmetic)),
    case(prints_its_loss, linears("a", "b", "c")),
    case(own_class_inside, linears("a", "b", inner=Layer)),
    case(k_from_a_tensor, inputs=_with_k),
    case(forces, linears("a", "b", out=partial(nn.Linear, WIDTH, 1))),
    case(shrunk_until_small),
    case(experts_by_where, linears("a", "b", experts=partial(SparseExperts, False))),
    case(experts_by_nonzero, linears("a", "b", experts=partial(SparseExperts, True))),
    case(packed_lstm, linears("a", "b", lstm=_LSTM), _lengths),
    case(checkpointed_blocks, linears("a", blocks=_blocks)),
    case(checkpointed_reentrant, linears("a", "b", blocks=_blocks)),
    case(checkpointed_numbers, linears("a", "b", block=ScaledBlock)),
    case(checkpointed_experts, linears("a", "b", experts=partial(SparseExperts, False))),
)
