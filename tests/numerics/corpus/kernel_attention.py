"""Attention by features of queries and keys: sums over a length, and a division by one of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import sequences

__all__ = ["CASES"]

WIDTH = 16


class Attention(nn.Module):
    """Queries, keys and values of a layer, and what an attention makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.qkv(x).chunk(3, -1))


class Performer(Attention):
    """Positive random features of a softmax kernel.

    Args:
        divided: num / den, however it is written.
    """

    def __init__(self, divided: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.divided = divided
        self.register_buffer("projection", torch.randn(32, WIDTH))

    def features(self, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        x = x * WIDTH**-0.25
        u = x @ self.projection.T - x.square().sum(-1, keepdim=True) / 2
        return 32**-0.5 * (torch.exp(u - u.amax(dims, keepdim=True).detach()) + 1e-4)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.features(q, (-1,)), self.features(k, (-1, -2))
        den = torch.einsum("bnm,bm->bn", q, k.sum(1))[..., None]
        return self.divided(torch.einsum("bnm,bme->bne", q, torch.einsum("bnm,bne->bme", k, v)), den)


class CausalPerformer(Performer):
    """The same with running sums over the length."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.features(q, (-1,)), self.features(k, (-1, -2))
        inverse = 1.0 / torch.einsum("bnm,bnm->bn", q, k.cumsum(1) + 1e-6)
        context = torch.einsum("bnm,bne->bnme", k, v).cumsum(1)
        return torch.einsum("bnme,bnm,bn->bne", context, q, inverse)


class Elu(Attention):
    """Linear transformers: `elu + 1`, normalised by a product of sums."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        inverse = 1 / (torch.einsum("nld,nd->nl", q, k.sum(1)) + 1e-6)
        return torch.einsum("nld,ndm,nl->nlm", q, torch.einsum("nsd,nsm->ndm", k, v), inverse)


class Cosformer(Attention):
    """Weights of a quarter turn over the length."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        place = math.pi / 2 * torch.arange(1, length + 1, device=q.device)[None, :, None] / length
        q, k = torch.relu(q), torch.relu(k)
        q = torch.cat([q * torch.sin(place), q * torch.cos(place)], -1)
        k = torch.cat([k * torch.sin(place), k * torch.cos(place)], -1)
        context = torch.einsum("nld,nlm->ndm", k, v)
        inverse = 1 / torch.clamp_min(torch.einsum("nld,nd->nl", q, k.sum(1)), 1e-2)
        return torch.einsum("nld,ndm,nl->nlm", q, context, inverse)


class Taylor(Attention):
    """Based: 1 + qk + (qk)²/2, as features."""

    def features(self, x: Tensor) -> Tensor:
        x = x / WIDTH**0.25
        square = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.features(q), self.features(k)
        total = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return torch.einsum("bnd,bdnm->bnm", q, torch.einsum("bnd,bnm->bdnm", k, v).cumsum(2)) / (total + 1e-6)


class Efficient(Attention):
    """Efficient attention: a softmax over features for queries, over the length for keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


class RandomWaves(Attention):
    """Random feature attention: sines and cosines of projections."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(WIDTH, 64))

    def features(self, x: Tensor) -> Tensor:
        u = F.normalize(x, dim=-1) @ self.projection
        return torch.cat([torch.sin(u), torch.cos(u)], -1) / 8

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.features(q), self.features(k)
        total = torch.einsum("bnd,bd->bn", q, k.sum(1))
        return torch.einsum("bnd,bdm->bnm", q, torch.einsum("bnd,bnm->bdm", k, v)) / total.clamp(min=0.1)[..., None]


class Retention(Attention):
    """RetNet: decays by distance, and a division by the sum of weights, at least one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[1], device=q.device)
        apart = place[:, None] - place
        decay = torch.where(apart >= 0, 0.95 ** apart.clamp(min=0), 0.0)
        decay = decay / decay.sum(-1, keepdim=True).sqrt()
        weights = q @ k.transpose(-1, -2) * decay
        return weights / weights.sum(-1, keepdim=True).abs().clamp(min=1) @ v


class Recurrent(Attention):
    """Gated linear attention as a recursion: its state begins with zeros."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = torch.zeros(q.shape[0], WIDTH, WIDTH)
        found = []
        for i in range(q.shape[1]):
            state = 0.98 * state + torch.einsum("bd,bm->bdm", k[:, i].sigmoid(), v[:, i])
            found.append(torch.einsum("bd,bdm->bm", q[:, i], state))
        return torch.stack(found, 1)


class DeltaNet(Attention):
    """The delta rule: what the state already gives for a key is taken away first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, k = q.new_zeros(q.shape[0], WIDTH, WIDTH), F.normalize(k, dim=-1)
        found = []
        for i in range(q.shape[1]):
            missing = v[:, i] - torch.einsum("bdm,bd->bm", state, k[:, i])
            state = state + 0.5 * k[:, i, :, None] * missing[:, None]
            found.append(torch.einsum("bd,bdm->bm", q[:, i], state))
        return torch.stack(found, 1)


class Weighted(Attention):
    """RWKV: running sums of exponentials, numerator and denominator."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num, den = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0])
        found = []
        for i in range(q.shape[1]):
            weight = torch.exp(k[:, i])
            found.append(torch.sigmoid(q[:, i]) * (num + 2 * weight * v[:, i]) / (den + 2 * weight))
            num, den = 0.97 * num + weight * v[:, i], 0.97 * den + weight
        return torch.stack(found, 1)


class AttentionFree(Attention):
    """Exponentials of keys and of learned biases by position."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.randn(64, 8) * 0.3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.exp((self.near @ self.near.T)[: q.shape[1], : q.shape[1]])
        k = torch.exp(k - k.amax(1, keepdim=True).detach())
        return torch.sigmoid(q) * (bias @ (k * v)) / (bias @ k)


class Nystrom(Attention):
    """Landmarks, and a pseudo-inverse of their kernel by iteration."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        few, many = (t.unflatten(1, (4, -1)).mean(2) for t in (q, k))
        scale = WIDTH**-0.5
        left, right = (q @ many.mT * scale).softmax(-1), (few @ k.mT * scale).softmax(-1)
        middle = (few @ many.mT * scale).softmax(-1) + 0.5 * torch.eye(4)
        inverse, one = middle.mT / (middle.sum(-1).amax() * middle.sum(-2).amax()), torch.eye(4)
        for _ in range(6):
            both = middle @ inverse
            inverse = 0.25 * inverse @ (13 * one - both @ (15 * one - both @ (7 * one - both)))
        return left @ inverse @ (right @ v)


class Plain(Attention):
    """Scores, a softmax and a weighted sum."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ v


class ByEinsum(Attention):
    """Two heads by einsum, with weights that a sum divides."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)) for t in (q, k, v))
        weight = torch.exp(torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5)
        mixed = torch.einsum("bhij,bjhd->bihd", weight, v)
        return (mixed / weight.sum(-1).mT[..., None]).flatten(-2)


class Gram(Attention):
    """Channel attention (XCiT): scores are sums over the length."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=1), F.normalize(k, dim=1)
        return v @ (4 * q.mT @ k).softmax(-1).mT


class Context(Attention):
    """A pooled context by a product with one weight a token."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weight = torch.sigmoid(k.mean(-1, keepdim=True))
        return q * (weight.mT @ v) / weight.sum(1, keepdim=True)


class Pooled(Attention):
    """Latent queries (Perceiver) read a length that only the call knows."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(5, WIDTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bln,bnd->bld", torch.einsum("ld,bnd->bln", self.latent, k / 4).softmax(-1), v + q)


POINT = "kernel attention"
ATTEND = ("attend",)
DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quotient": lambda num, den: num / den,
    "inverse": lambda num, den: num * (1.0 / den),
    "inverse-first": lambda num, den: den.reciprocal() * num,
    "power": lambda num, den: num * den**-1,
}
WHY = "the projections 3; the rest is exact; an exponential of up to four"


def _kernel(
    name: str, build: Callable[[], nn.Module], condition: float = 2.0, sizes: tuple[int, int] = (16, 24)
) -> Case:
    why = f"queries, keys and values 3; what is made of them is {condition:g} times as far off"
    return Case(name, build, sequences(WIDTH), POINT, Demand(3, condition), why, ATTEND, sizes=sizes)


def _short(name: str, build: Callable[[], nn.Module]) -> Case:
    """Captured with four tokens, used with more: what is a short sum at capture is none later."""
    return Case(name, build, sequences(WIDTH), "short sums", Demand(6, 2.0),
                "queries, keys and values 3, weights 1, product 2; each counts twice", sizes=(4, 96))  # fmt: skip


CASES = (
    *(
        Case(f"performer-{n}", lambda d=d: Performer(d), lambda size: 2 * torch.randn(2, size, WIDTH), POINT,
             Demand(3, 4), WHY, ATTEND, sizes=(16, 24))
        for n, d in DIVIDED.items()
    ),
    Case("performer-causal", lambda: CausalPerformer(torch.div), lambda size: 2 * torch.randn(2, size, WIDTH), POINT,
         Demand(3, 4), WHY, ATTEND, sizes=(16, 24)),
    _kernel("elu-attention", Elu),
    _kernel("cosformer", Cosformer),
    _kernel("taylor-features", Taylor),
    _kernel("random-waves", RandomWaves, 4.0),
    _kernel("retention", Retention),
    _kernel("gated-recursion", Recurrent, sizes=(6, 10)),
    _kernel("delta-rule", DeltaNet, sizes=(6, 10)),
    _kernel("weighted-recursion", Weighted, sizes=(6, 10)),
    _kernel("attention-free", AttentionFree),
    _kernel("landmarks", Nystrom, 4.0),
    _short("attention-of-four", Plain),
    _short("einsum-of-four", ByEinsum),
    _short("efficient-of-four", Efficient),
    _short("channels-of-four", Gram),
    _short("pooled-context", Context),
    _short("latent-queries", Pooled),
    _short("elu-of-four", Elu),
)  # fmt: skip
