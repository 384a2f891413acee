"""Cases with in-place writes, changing buffers, shared or computed weights, and custom gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.models.hand.case import WIDTH, case, images, linears, rows, tokens


def item_assignment(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[:, 0] = 0.0
    y[..., :2] = y[..., 2:4] * 2
    return self.b(y)


def in_place_on_views(self: Any, x: Tensor) -> Tensor:
    y = self.a(x).clone()
    y[:, 1:].add_(1)
    y.transpose(1, 2).mul_(0.5)
    return self.b(y)


def filled_piece_by_piece(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], x.shape[1], 2 * WIDTH)
    out[..., :WIDTH] = self.a(x)
    out[..., WIDTH:].copy_(self.b(x))
    return out


def input_written(self: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return self.b(self.a(x).relu_())


def moving_average(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    with torch.no_grad():
        self.mean.mul_(0.999).add_(y.mean((0, 1)), alpha=0.001)
        self.calls += 1
    return self.b(y - self.mean)


def reassigned_buffer(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    self.mean = 0.999 * self.mean + 0.001 * y.detach().mean((0, 1))
    return self.b(y - self.mean)


def batch_norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.convolve(x)).relu()


def instance_norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.convolve(x)).relu()


def dropouts(self: Any, x: Tensor) -> Tensor:
    return self.b(F.dropout(self.a(x), 0.3, self.training) + F.alpha_dropout(x, 0.2, self.training))


def tied_weights(self: Any, ids: Tensor) -> Tensor:
    return F.linear(self.a(self.table(ids)), self.table.weight)


def padding_index(self: Any, ids: Tensor) -> Tensor:
    return self.a(self.table(ids))


def weight_norm(self: Any, x: Tensor) -> Tensor:
    return self.b(self.normed(x))


def spectral_norm(self: Any, x: Tensor) -> Tensor:
    return self.b(self.normed(x))


class _Rounded(torch.autograd.Function):
    """Rounds, and lets gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def straight_through(self: Any, x: Tensor) -> Tensor:
    return self.b(_Rounded.apply(self.a(x) * 0.01) + self.a(x))


def detached_target(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = self.b(x)
    return F.mse_loss(self.a(x), target) + (self.a(x) - self.b(x).detach()).abs().mean()


@torch.library.custom_op("autocastfx_zoo::halved", mutates_args=())
def _halved(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"made for float32, given {x.dtype}")
    return x * 0.5


@_halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_halved.register_autograd(lambda ctx, grad: grad * 0.5)


def unlisted_custom_op(self: Any, x: Tensor) -> Tensor:
    return self.b(_halved(self.a(x)))


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return self.b(checkpoint(self.a, x, use_reentrant=False))


_convolved = partial(nn.Conv2d, 4, 8, 3, padding=1)
_mean = linears("a", "b", mean=partial(torch.zeros, WIDTH), calls=partial(torch.zeros, (), dtype=torch.long))
_table = linears("a", table=lambda: nn.Embedding(32, WIDTH, padding_idx=1))


def _normed(kind: Any) -> Any:
    return linears("b", normed=lambda: kind(nn.Linear(WIDTH, WIDTH)))


def _crowd(batch: int, size: int) -> dict[str, Any]:
    return images(4 * batch, size)


CASES = (
    *(case(f) for f in (item_assignment, in_place_on_views, filled_piece_by_piece, input_written, dropouts)),
    *(case(f, _mean) for f in (moving_average, reassigned_buffer)),
    case(batch_norm, linears(convolve=_convolved, norm=lambda: nn.BatchNorm2d(8)), _crowd),
    case(
        instance_norm,
        linears(convolve=_convolved, norm=lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        images,
    ),
    *(case(f, _table, tokens) for f in (tied_weights, padding_index)),
    case(weight_norm, _normed(parametrizations.weight_norm)),
    case(spectral_norm, _normed(parametrizations.spectral_norm)),
    *(case(f, inputs=rows) for f in (straight_through, detached_target, unlisted_custom_op)),
    case(checkpointed),
)
