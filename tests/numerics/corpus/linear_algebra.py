"""Linear algebra: what rounds once is amplified by the condition of a matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.parts import rows

__all__ = ["CASES"]

WIDTH = 16


class Ridge(nn.Module):
    """A closed-form ridge regression on encoded rows (R2D2, SVGP heads)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 12)

    def solve(self, z: Tensor, y: Tensor) -> Tensor:
        gram = z.T @ z + 0.05 * torch.eye(z.shape[1], device=z.device)
        return torch.linalg.solve(gram, z.T @ y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.tanh(self.encode(x))
        return self.predict(z, self.solve(z, y))

    def predict(self, z: Tensor, weight: Tensor) -> Tensor:
        return z @ weight


class GaussianProcess(nn.Module):
    """A posterior mean: a kernel of inputs, a Cholesky factor, two triangular solves."""

    def __init__(self) -> None:
        super().__init__()
        self.stretch, self.out = nn.Parameter(torch.tensor(1.0)), nn.Linear(1, WIDTH)

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        apart = (a * a).sum(-1)[:, None] + (b * b).sum(-1)[None] - 2 * a @ b.T
        return torch.exp(-apart.clamp_min(0) / (2 * self.stretch**2))

    def posterior(self, x: Tensor, y: Tensor, new: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.kernel(x, x) + 1e-2 * torch.eye(x.shape[0], device=x.device))
        return self.kernel(new, x) @ torch.cholesky_solve(y[:, None], factor)

    def forward(self, x: Tensor, y: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.posterior(x, y, new)
        return self.out(mean), mean


class Whitening(nn.Module):
    """Whitening by a Cholesky factor of the covariance of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 4)

    def whiten(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        covariance = x.T @ x / (x.shape[0] - 1) + 1e-4 * torch.eye(x.shape[1], device=x.device)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), x.T, upper=False).T

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        white = self.whiten(x)
        return self.out(white), white


class Components(nn.Module):
    """Principal values of the inputs by an eigendecomposition of their covariance."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 4)

    def values(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return torch.linalg.eigvalsh(x.T @ x / x.shape[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = self.values(x)
        return self.out(values.clamp_min(1e-6).log()), values


class MelLevels(nn.Module):
    """Log mel levels: power spectra through a bank of triangles, whose values underflow float16."""

    def __init__(self) -> None:
        super().__init__()
        place = torch.linspace(0, 1, 33)
        centre = torch.linspace(0.05, 0.95, 12)[:, None]
        self.register_buffer("bank", (1 - (place - centre).abs() * 10).clamp_min(0))
        self.register_buffer("window", torch.hann_window(64))
        self.out = nn.Linear(12, WIDTH)

    def levels(self, wave: Tensor) -> Tensor:
        frames = wave.unfold(-1, 64, 32) * self.window
        power = torch.fft.rfft(frames).abs().square()
        return torch.log10((power @ self.bank.T).clamp_min(1e-10))

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        levels = self.levels(wave)
        return self.out(levels), levels


class FourierByProduct(nn.Module):
    """A spectrum by products with cosines and sines, as Whisper-like frontends export it."""

    def __init__(self) -> None:
        super().__init__()
        turn = 2 * math.pi * torch.arange(33)[:, None] * torch.arange(64)[None] / 64
        self.register_buffer("cosines", turn.cos())
        self.register_buffer("sines", turn.sin())
        self.out = nn.Linear(33, WIDTH)

    def levels(self, wave: Tensor) -> Tensor:
        frames = wave.unfold(-1, 64, 32)
        power = (frames @ self.cosines.T) ** 2 + (frames @ self.sines.T) ** 2
        return torch.log(power + 1e-10)

    def forward(self, wave: Tensor) -> Tensor:
        return self.out(self.levels(wave))


class LinearAttention(nn.Module):
    """Linear attention: a normaliser that sums thousands of keys, in range-expanding products."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = F.elu(query) + 1, F.elu(key) + 1
        held = torch.einsum("bnd,bne->bde", key, value)
        return torch.einsum("bnd,bde->bne", query, held) / self.normaliser(query, key)[..., None]

    def normaliser(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("bnd,bd->bn", query, key.sum(1)) + 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.query(x) * 3, self.key(x) * 3, self.value(x))


class StyleLoss(nn.Module):
    """Gram matrices of features over all pixels: sums beyond float16, then normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, 8, 3)

    def gram(self, features: Tensor) -> Tensor:
        flat = features.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        return torch.log1p(self.gram(self.encode(x) * 16).diagonal(dim1=1, dim2=2))


class Orthogonalised(nn.Module):
    """Newton-Schulz steps towards an orthogonal weight, from small entries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12) * 1e-3)

    def orthogonal(self, weight: Tensor) -> Tensor:
        x = weight / (weight.norm() + 1e-7)
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.orthogonal(self.weight))


class Kalman(nn.Module):
    """Filter steps with 2 x 2 covariances and an inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 2)
        self.register_buffer("move", torch.tensor([[1.0, 0.1], [0.0, 1.0]]))

    def step(self, state: Tensor, spread: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        state, spread = state @ self.move.T, self.move @ spread @ self.move.T + 1e-3 * torch.eye(2, device=seen.device)
        gain = spread @ torch.linalg.inv(spread + 0.1 * torch.eye(2, device=seen.device))
        return state + (seen - state) @ gain.T, spread - gain @ spread

    def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        state, spread = start, torch.eye(2, device=x.device)
        seen = self.encode(x)
        for i in range(5):
            state, spread = self.step(state, spread, start + seen[:, i])
        return state, spread


def _regression(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 2)


def _process(size: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.rand(size, 2) * 8 + 20
    return x, (x[:, 0] * 0.7).sin(), torch.rand(6, 2) * 8 + 20


def _tones(size: int) -> Tensor:
    at = torch.arange(64 * size) / 16000
    return torch.stack([torch.sin(at * tone * 6.28) * 2e-4 for tone in (440, 1900)]) + 1e-5 * torch.randn(2, 64 * size)


def _correlated(size: int) -> Tensor:
    return torch.randn(size, WIDTH) @ (torch.eye(WIDTH) + 0.2 * torch.randn(WIDTH, WIDTH)) + 3


POINT = "linear algebra"
CASES = (
    Case("ridge-head", Ridge, _regression, POINT, Demand(4, 6.0),
         "encode 3, tanh 1; of 24 rows for 12 columns the solve "
         "amplifies by the square root of a condition of 40", ("solve", "predict"), sizes=(24, 32)),
    Case("gaussian-process", GaussianProcess, _process, POINT, Demand(3), "out 3; the posterior is exact",
         ("posterior",),
         {"output 1": Demand(0), "gradient stretch": Demand(3)}, sizes=(20, 28)),
    Case("whitening", Whitening, _correlated, POINT, Demand(3), "out 3; whitening is exact", ("whiten",),
         {"output 1": Demand(0)}, sizes=(64, 80)),
    Case("principal-values", Components, _correlated, POINT, Demand(3), "out 3; values are exact", ("values",),
         {"output 1": Demand(0)}, sizes=(64, 80)),
    Case("mel-levels", MelLevels, _tones, POINT, Demand(3),
         "out 3; filters 3, below a logarithm: a tenth of the levels", ("levels",), {"output 1": Demand(3, 0.1)}),
    Case("fourier-by-product", FourierByProduct, _tones, POINT, Demand(3), "out 3; levels are exact", ("levels",)),
    Case("linear-attention", LinearAttention, lambda n: torch.randn(1, n, WIDTH), "sums", Demand(6, 1.5),
         "query, key and value 3 and scaling 1, as quotients; elu 1, division 1", ("normaliser",), sizes=(3000, 4000)),
    Case("gram-matrices", StyleLoss, lambda n: torch.randn(2, 3, n, n), POINT, Demand(4),
         "encode 3, scaling 1, below a logarithm",
         ("gram",), sizes=(24, 32)),
    Case("newton-schulz", Orthogonalised, rows(12), "provenance", Demand(4, 1.0, 3.0),
         "weight 1, product 3; steps triple a gradient",
         ("orthogonal",)),
    Case("kalman-filter", Kalman, lambda n: (torch.randn(n, 5, WIDTH), 100 + torch.randn(n, 2)), "shape",
         Demand(3, 0.01, 1.0),
         "encode 3, beside a state of a hundred", ("step",), {"output 1": Demand(0)}),
)  # fmt: skip
