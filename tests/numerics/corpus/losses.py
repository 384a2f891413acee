"""Losses written by hand, as papers give them: exponents, logarithms and small differences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import mlp

__all__ = ["CASES"]

WIDTH = 16
CLASSES = 6


class Loss(nn.Module):
    """A loss of what a layer gives; ``reach`` scales the scores to confident ones."""

    reach = 4.0

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, CLASSES)

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.score(x) * self.reach, target)


class Focal(Loss):
    """Focal loss on probabilities, with the usual clamp."""

    reach = 6.0

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(score).clamp(1e-6, 1 - 1e-6)
        right = -0.25 * (1 - p) ** 2 * torch.log(p)
        wrong = -0.75 * p**2 * torch.log(1 - p)
        return (target * right + (1 - target) * wrong).sum(-1).mean()


class FocalOfLogs(Focal):
    """Focal loss by the exponent of a cross entropy: 1 - exp(-ce) is small where the model is right."""

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        ce = F.relu(score) - score * target + torch.log1p(torch.exp(-score.abs()))
        return ((1 - torch.exp(-ce)) ** 2 * ce).sum(-1).mean()


class BinaryByHand(Loss):
    """Binary cross entropy on a sigmoid, with an epsilon inside the logarithm."""

    reach = 8.0

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(score)
        return -(target * torch.log(p + 1e-7) + (1 - target) * torch.log(1 - p + 1e-7)).mean()


class BinaryOfProbabilities(Loss):
    """torch's own binary cross entropy on probabilities: torch.autocast refuses it."""

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(score), target)


class InfoNce(nn.Module):
    """Contrastive loss of normalised vectors at a temperature of 0.07."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        scores = left @ right.T / 0.07
        target = torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


class SharpContrast(Loss):
    """The same by hand, by exponents of scores that reach 14: e^14 is beyond float16."""

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        raised = torch.exp(F.normalize(score, dim=-1) / 0.07)
        return -torch.log((raised * target).sum(-1) / raised.sum(-1) + 1e-8).mean()


class Smoothed(Loss):
    """Label smoothing by hand over log-probabilities."""

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        log_p = F.log_softmax(score, -1)
        return (-0.9 * log_p.gather(-1, target.argmax(-1, keepdim=True)).squeeze(-1) - 0.1 * log_p.mean(-1)).mean()


class DivergenceByHand(Loss):
    """KL divergence of a student from a teacher, of softmax and log by hand."""

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        teacher = torch.softmax(target * 3, -1)
        student = torch.softmax(score, -1)
        return (teacher * (torch.log(teacher) - torch.log(student))).sum(-1).mean()


class GaussianDivergence(nn.Module):
    """The KL divergence of a variational encoder: 1 + log var - mean^2 - var."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = 0.1 * self.mean(x), 0.1 * self.spread(x)
        return self.divergence(mean, spread)

    def divergence(self, mean: Tensor, spread: Tensor) -> Tensor:
        return -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(-1)


class Dice(Loss):
    """Dice loss over a mask: sums of many probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def loss(self, score: Tensor, target: Tensor) -> Tensor:
        p, target = torch.sigmoid(score).flatten(1), target.flatten(1)
        shared = (p * target).sum(1)
        return 1 - (2 * shared + 1) / (p.sum(1) + target.sum(1) + 1)


class Paths(nn.Module):
    """The forward recursion of CTC: log-sum-exp of two paths at each of many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 4)

    def recursion(self, log_p: Tensor) -> Tensor:
        alpha = torch.full_like(log_p[:, 0], -50.0)
        alpha = torch.cat([log_p[:, 0, :1], alpha[:, 1:]], 1)
        for step in range(1, 12):
            before = F.pad(alpha[:, :-1], (1, 0), value=-50.0)
            alpha = torch.logaddexp(alpha, before) + log_p[:, step]
        return -alpha[:, -1]

    def forward(self, x: Tensor) -> Tensor:
        return self.recursion(self.score(x).log_softmax(-1))


class GaussianLikelihood(nn.Module):
    """The likelihood of depths in metres under a predicted mean and spread."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 2)
        self.register_buffer("usual", torch.tensor(80.0))

    def likelihood(self, mean: Tensor, spread: Tensor, depth: Tensor) -> Tensor:
        variance = F.softplus(spread) * 0.01 + 1e-4
        return 0.5 * (torch.log(variance) + (depth - (self.usual + mean)) ** 2 / variance)

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        mean, spread = self.encode(x).unbind(-1)
        return self.likelihood(mean, spread, depth)


class Mixture(nn.Module):
    """A mixture of discretised logistics: differences of sigmoids that nearly meet."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 9)

    def likelihood(self, parts: Tensor, level: Tensor) -> Tensor:
        weight, mean, spread = parts.chunk(3, -1)
        scale = torch.exp(-spread.clamp_min(-3))
        centred = level[:, None] - torch.tanh(mean)
        high = torch.sigmoid(scale * (centred + 1 / 255))
        low = torch.sigmoid(scale * (centred - 1 / 255))
        return -torch.logsumexp(weight.log_softmax(-1) + torch.log((high - low).clamp_min(1e-12)), -1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.likelihood(self.encode(x), level)


class Triplet(nn.Module):
    """A soft margin on two distances between nearby vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = mlp(WIDTH, 32, 8)

    def apart(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).pow(2).sum(-1).add(1e-6).sqrt()

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        anchor, near, far = self.encode(anchor), self.encode(near), self.encode(far)
        return F.softplus(self.apart(anchor, near) - self.apart(anchor, far))


class Cosine(nn.Module):
    """One minus a cosine of vectors that nearly agree: self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, x + 0.1 * self.change(x))

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return 1 - (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(-1)


class Charbonnier(nn.Module):
    """A smooth absolute error of images in 0..255, with an epsilon of 1e-6."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        clean = x + 0.05 * self.change(x)
        return torch.sqrt((clean - target) ** 2 + 1e-6).mean()


class SquaredPixels(Charbonnier):
    """A sum of squared errors of pixels: beyond float16."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        error = self.change(x) - target
        return (error * error).sum((1, 2, 3)).sqrt()


def _labelled(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), F.one_hot(torch.randint(CLASSES, (size,)), CLASSES).float()


def _two(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def _masked(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, size, WIDTH), (torch.rand(2, size, 1) < 0.3).float()


def _measured(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), 80 + torch.randn(size)


def _three(size: int) -> tuple[Tensor, Tensor, Tensor]:
    anchor = torch.randn(size, WIDTH)
    return anchor, anchor + 0.3 * torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def _pictures(size: int) -> tuple[Tensor, Tensor]:
    return torch.rand(size, 3, 12, 12) * 255, torch.rand(size, 3, 12, 12) * 255


POINT = "demand"
SCORED = Demand(4, 3.0)
SCORED_WHY = "score 3, scaling 1; scores reach 6, whose absolute error stands beside losses near 2"
IN_LOSS = ("loss",)
CASES = (
    Case("focal-by-hand", Focal, _labelled, POINT, SCORED, SCORED_WHY, IN_LOSS),
    Case("focal-of-logs", FocalOfLogs, _labelled, POINT, SCORED, SCORED_WHY, IN_LOSS),
    Case("binary-by-hand", BinaryByHand, _labelled, POINT, SCORED, SCORED_WHY, IN_LOSS),
    Case("binary-of-probabilities", BinaryOfProbabilities, _labelled, POINT, SCORED, SCORED_WHY, IN_LOSS),
    Case("info-nce", InfoNce, _two, POINT, Demand(7, 4.0),
         "layers 3, norms 1, product 2, temperature 1; scores reach 8"),
    Case("sharp-contrast", SharpContrast, _labelled, POINT, Demand(4, 7.0),
         "score 3, scaling 1; scores reach 14 beside losses near 2", IN_LOSS),
    Case("label-smoothing", Smoothed, _labelled, POINT, SCORED, SCORED_WHY),
    Case("divergence-by-hand", DivergenceByHand, _labelled, POINT, SCORED, SCORED_WHY, IN_LOSS),
    Case("gaussian-divergence", GaussianDivergence, lambda n: torch.randn(n, WIDTH), "demand", Demand(4, 2.0),
         "mean and spread 3, scaling 1, both squared", ("divergence",)),
    Case("dice", Dice, _masked, "sums", Demand(4), "score 3, scaling 1; the slope of a sigmoid is a quarter", IN_LOSS,
         sizes=(900, 1300)),
    Case("ctc-recursion", Paths, lambda n: torch.randn(n, 12, WIDTH), "provenance", Demand(4),
         "score 3, log-softmax 1", ("recursion",)),
    Case("gaussian-likelihood", GaussianLikelihood, _measured, "provenance", Demand(3, 4.0),
         "encode 3; twice in a square over a small variance, twice in the variance", ("likelihood",)),
    Case("discretised-logistics", Mixture, lambda n: (torch.randn(n, WIDTH), torch.rand(n) * 2 - 1), POINT,
         Demand(3, 2.0), "encode 3; in an exponent, and times e", ("likelihood",)),
    Case("triplet", Triplet, _three, "squares", Demand(6, 3.0), "encode 6; near vectors differ by a third", ("apart",)),
    Case("one-minus-cosine", Cosine, lambda n: torch.randn(n, WIDTH), "provenance", Demand(4, 2.0),
         "change 3, scaling 1, squared", IN_LOSS),
    Case("charbonnier", Charbonnier, _pictures, "provenance", Demand(4, 0.1, 1.0),
         "change 3, scaling 1, a twentieth of the picture"),
    Case("squared-pixels", SquaredPixels, _pictures, "squares", Demand(3), "change 3; the target is exact"),
)  # fmt: skip
