"""Cases with values beyond 16 bits, dtypes that must not change, and ops that compute with image positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.hand.case import WIDTH, case, images, linears


def large_squared_norm(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) * 300
    return self.b(y / y.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-6))


def large_constants(self: Any, x: Tensor) -> Tensor:
    return self.b((self.a(x) * 1e6 / 1e6).nan_to_num(0.0, 1e9, -1e9).clamp(-1e7, 1e7))


def small_epsilon(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(y / (y.abs() + 1e-10))


def variance(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) + 100
    return self.b((y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True))


def running_sum(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def positions(self: Any, x: Tensor) -> Tensor:
    at = torch.arange(3000, 3000 + x.shape[1], dtype=torch.float32)[:, None]
    angles = at * torch.exp(torch.arange(0, WIDTH, 2) * -0.5)
    return self.b(self.a(x) + torch.cat([angles.sin(), angles.cos()], -1))


def rotated_complex(self: Any, x: Tensor) -> Tensor:
    turned = torch.polar(torch.ones(x.shape[1], WIDTH // 2), torch.arange(x.shape[1])[:, None] * torch.rand(WIDTH // 2))
    pairs = torch.view_as_complex(self.a(x).float().unflatten(-1, (-1, 2)))
    return self.b(torch.view_as_real(pairs * turned).flatten(-2))


def spectrum(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.fft.fft(self.a(x), dim=1).real + torch.fft.irfft(torch.fft.rfft(x, dim=2), n=WIDTH, dim=2))


def double_path(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.a(x)
    wide = (y.double() + 1e8).sum((1, 2)) - 1e8 * y.shape[1] * WIDTH
    return self.b(y), wide


def log_sum_exp(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) * 30
    return self.b(y - y.logsumexp(-1, keepdim=True))


def distances(self: Any, x: Tensor) -> Tensor:
    return torch.cdist(self.a(x), self.b(x)) + torch.cosine_similarity(self.a(x), x, dim=-1)[..., None]


def einsums(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.einsum("bic,bjc,bjd->bid", self.a(x), x, x) / WIDTH)


def scattered(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    into = torch.arange(x.shape[1]) % 3
    sums = torch.zeros(x.shape[0], 3, WIDTH).index_add(1, into, y)
    return self.b(sums.scatter_add(1, into[None, :, None].expand_as(y), y))


def index_put_accumulated(self: Any, x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], x.shape[1], WIDTH)
    total[:, torch.arange(x.shape[1]).flip(0)] += self.a(x)
    return self.b(total)


def routed_experts(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weights, chosen = self.router(flat).softmax(-1).topk(2)
    total = torch.zeros_like(flat)
    for number, expert in enumerate((self.a, self.b)):
        share = (weights * (chosen == number)).sum(-1, keepdim=True)
        total = total + share * expert(flat)
    return total.view_as(x)


def interpolated(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = self.convolve(x)
    smooth = (F.interpolate(y, scale_factor=2.0, mode=m, align_corners=False) for m in ("bilinear", "bicubic"))
    return F.interpolate(y, scale_factor=2.0), F.interpolate(y, size=(5, 7), mode="area"), *smooth


def sampled_grid(self: Any, x: Tensor) -> Tensor:
    grid = F.affine_grid(self.theta.expand(x.shape[0], -1, -1), list(x.shape), align_corners=False)
    return F.grid_sample(self.convolve(x), grid, align_corners=False)


def shuffled_pixels(self: Any, x: Tensor) -> Tensor:
    return F.pad(F.pixel_shuffle(self.convolve(x), 2), (1, 1, 1, 1), mode="reflect")


def pooled(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = self.convolve(x)
    return F.max_pool2d(y, 2), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 3), F.lp_pool2d(y, 2.0, 2)


def transposed_convolution(self: Any, x: Tensor) -> Tensor:
    return self.back(F.group_norm(self.convolve(x), 2).relu())


def folded_patches(self: Any, x: Tensor) -> Tensor:
    patches = F.unfold(self.convolve(x), 2, stride=2)
    return F.fold(patches * 0.5, (x.shape[2] // 2 * 2, x.shape[3] // 2 * 2), 2, stride=2)


_convolved = linears(convolve=partial(nn.Conv2d, 4, 8, 3, padding=1))
_ON_ROWS = (
    *(large_squared_norm, large_constants, small_epsilon, variance, running_sum, positions, rotated_complex, spectrum),
    *(double_path, log_sum_exp, distances, einsums, scattered, index_put_accumulated),
)
CASES = (
    *(case(f) for f in _ON_ROWS),
    case(routed_experts, linears("a", "b", router=partial(nn.Linear, WIDTH, 2))),
    *(case(f, _convolved, images) for f in (interpolated, shuffled_pixels, pooled, folded_patches)),
    case(
        sampled_grid,
        linears(
            convolve=partial(nn.Conv2d, 4, 8, 3, padding=1),
            theta=lambda: nn.Parameter(torch.tensor([[[0.9, 0.1, 0.0], [-0.1, 0.9, 0.1]]])),
        ),
        images,
    ),
    case(
        transposed_convolution,
        linears(convolve=partial(nn.Conv2d, 4, 8, 3), back=partial(nn.ConvTranspose2d, 8, 4, 3)),
        images,
    ),
)
