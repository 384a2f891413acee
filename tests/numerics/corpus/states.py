"""State between calls: running statistics, averages and codebooks, which small updates must reach."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import images, rows

__all__ = ["CASES"]

WIDTH = 16


class RunningMean(nn.Module):
    """Standardised by running statistics, which are updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), 0.5))
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        if self.training:
            self.update(z.detach())
        return (z - self.mean) / self.spread.sqrt()

    def update(self, z: Tensor) -> None:
        self.mean.mul_(0.99).add_(0.01 * z.mean(0))
        self.spread.lerp_(z.var(0), 0.01)


class SlowCopy(nn.Module):
    """A momentum encoder: weights that follow by a thousandth, as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slow", torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.copy_(0.999 * self.slow + 0.001 * self.fast.weight)
        return F.cosine_similarity(self.fast(x), F.linear(x, self.slow), dim=-1)


class Centre(nn.Module):
    """DINO's centre: an average of a teacher's scores, subtracted before a sharp softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 8)
        self.register_buffer("centre", torch.randn(1, 8))

    def sharpen(self, score: Tensor) -> Tensor:
        p = ((score - self.centre) / 0.5).softmax(-1)
        self.centre.copy_(self.centre * 0.999 + score.detach().mean(0, keepdim=True) * 0.001)
        return p

    def forward(self, x: Tensor) -> Tensor:
        return self.sharpen(self.teacher(x))


class Codebook(nn.Module):
    """VQ-VAE: the nearest code, a straight-through gradient, and averages of counts and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(12, 4))
        self.register_buffer("count", torch.full((12,), 700.0))
        self.register_buffer("total", self.codes * 700)

    def quantise(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        hot = F.one_hot(nearest, 12).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.99).add_(hot.sum(0), alpha=0.01)
                self.total.mul_(0.99).add_(hot.T @ x, alpha=0.01)
                self.codes.copy_(self.total / self.count.clamp_min(1e-5)[:, None])
        return self.codes[nearest]

    def forward(self, x: Tensor) -> Tensor:
        code = self.quantise(x)
        return self.scale(x + (code - x).detach())


class MemoryBank(nn.Module):
    """A queue of keys: the oldest rows are replaced by new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 8)
        self.register_buffer("queue", F.normalize(torch.randn(32, 8), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        key = F.normalize(self.encode(x), dim=-1)
        scores = key @ self.queue.clone().T / 0.2
        self.queue.copy_(torch.cat([self.queue[x.shape[0] :], key.detach()]))
        return scores


class StepCounter(nn.Module):
    """A warm-up weight from a float counter of steps, which stands at 3,000."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("step", torch.tensor(3000.0))

    def forward(self, x: Tensor) -> Tensor:
        self.step.add_(1)
        return self.encode(x) * torch.clamp(self.step / 4000, max=1.0)


class Ewma(nn.Module):
    """A normaliser of returns: a running second moment of values near a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)
        self.register_buffer("square", torch.tensor(9e5))

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        self.square.lerp_((reward * reward).mean(), 0.01)
        return (reward / self.square.sqrt() - self.value(x).squeeze(-1)) ** 2


class Normalised(nn.Module):
    """Batch norm after a convolution, with a slow momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.01)
        nn.init.uniform_(self.norm.running_mean, 0.2, 0.6)
        nn.init.constant_(self.conv.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))


class SpectralNorm(nn.Module):
    """A weight divided by its largest singular value, by one step of power iteration kept as state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("left", F.normalize(torch.randn(WIDTH), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.normalised())

    def normalised(self) -> Tensor:
        with torch.no_grad():
            right = F.normalize(torch.mv(self.weight.T, self.left), dim=0)
            left = F.normalize(torch.mv(self.weight, right), dim=0)
            self.left.copy_(left)
        return self.weight / torch.dot(left, torch.mv(self.weight, right))


class Usage(nn.Module):
    """Expert load: counts that grow over calls, and a bias against busy experts."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 4)
        self.register_buffer("load", torch.tensor([2100.0, 2101.0, 2102.0, 2103.0]))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        self.load += F.one_hot(chosen, 4).sum(0)
        return (self.score(x) - (self.load - self.load.mean()) * 0.1).softmax(-1)


POINT = "state"
CASES = (
    Case("running-statistics", RunningMean, rows(WIDTH), POINT, Demand(5, 1.5), "encode 3, difference 1, division 1",
         ("update",), {"buffer mean": Demand(3, 0.01), "buffer spread": Demand(3, 0.02)}),
    Case("slow-copy", SlowCopy, rows(WIDTH), POINT, Demand(4, 1.5), "products 3, cosine 1",
         tensors={"buffer slow": Demand(0)}),
    Case("moving-centre", Centre, rows(WIDTH), POINT, Demand(3, 2.0), "teacher 3, doubled in an exponent",
         ("sharpen",), {"buffer centre": Demand(3, 1e-3)}),
    Case("codebook", Codebook, rows(4), POINT, Demand(3), "scale 3; codes are exact", ("quantise",),
         {f"buffer {name}": Demand(0) for name in ("codes", "count", "total")}, sizes=(40, 60)),
    Case("memory-bank", MemoryBank, rows(WIDTH), POINT, Demand(7), "encode 3, norm 1, product 2, temperature 1",
         tensors={"buffer queue": Demand(4)}),
    Case("step-counter", StepCounter, rows(WIDTH), POINT, Demand(4), "encode 3, weight 1",
         tensors={"buffer step": Demand(0)}),
    Case("second-moment", Ewma, lambda n: (torch.randn(n, WIDTH), torch.randn(n) * 1000), POINT, Demand(3, 2.0),
         "value 3, squared", tensors={"buffer square": Demand(0)}),
    Case("slow-batch-norm", Normalised, images(3, 8), POINT, Demand(5, 1.5), "convolution 3, norm 1, gelu 1",
         tensors={"buffer norm.running_mean": Demand(3, 0.05), "buffer norm.running_var": Demand(3, 0.05)}),
    Case("spectral-norm", SpectralNorm, rows(WIDTH), POINT, Demand(4), "weight 1, product 3", ("normalised",),
         {"buffer left": Demand(0)}),
    Case("expert-load", Usage, lambda n: (torch.randn(n, WIDTH), torch.randint(4, (n,))), POINT, Demand(3, 1.5),
         "score 3, in an exponent", tensors={"buffer load": Demand(0)}),
)  # fmt: skip
