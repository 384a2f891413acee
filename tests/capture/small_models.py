"""Small models of many kinds, each with the inputs of one call: what people write in ``forward``.

Eight features or more, for a product over fewer is elementwise work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Straight

__all__ = ["DEFERRED", "MODELS", "Small", "made"]


@dataclass(frozen=True)
class Small:
    """A model and a call. ``modes``: the modes in which it differs."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], Mapping[str, Any]]
    modes: tuple[bool, ...]


MODELS: dict[str, Small] = {}
DEFERRED: set[str] = set()  # what tracing without inputs cannot follow


def small(
    *args: Callable[[], Any],
    kwargs: Mapping[str, Callable[[], Any]] | None = None,
    modes: tuple[bool, ...] = (True,),
    deferred: bool = False,
    **held: Callable[[], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a ``forward`` as a model of the modules, parameters and buffers that ``held`` makes."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        _add(forward.__name__, lambda: made(forward, **held), args, kwargs or {}, modes, deferred)
        return forward

    return register


def made(forward: Callable[..., Any], **held: Callable[[], Any]) -> nn.Module:
    """A model with this ``forward`` and the modules, parameters and buffers that ``held`` makes."""
    model = type(forward.__name__, (nn.Module,), {"forward": forward})()
    for name, make in held.items():
        value = make()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            model.register_buffer(name, value)
        else:
            setattr(model, name, value)
    return model


def whole(
    name: str,
    make: Callable[[], nn.Module],
    *args: Callable[[], Any],
    modes: tuple[bool, ...] = (True,),
    deferred: bool = False,
) -> None:
    """Register a module as it is."""
    _add(name, make, args, {}, modes, deferred)


def _add(name: str, make: Any, args: Any, kwargs: Any, modes: tuple[bool, ...], deferred: bool) -> None:
    assert name not in MODELS, name
    MODELS[name] = Small(
        make, lambda: tuple(a() for a in args), lambda: {name: a() for name, a in kwargs.items()}, modes
    )
    if deferred:
        DEFERRED.add(name)


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def ints(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


def bools(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(*shape) > 0.4


def lin(n: int = 8, m: int = 8, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(n, m, **options)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(*shape) / 2)


BOTH = (True, False)

# -- layers in a row --------------------------------------------------------------------------------------------------

whole("mlp", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)), normal(3, 8), modes=BOTH)
whole(
    "cnn",
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 2),
    ),
    normal(2, 3, 8, 8),
    modes=BOTH,
)  # fmt: skip
whole("conv1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 3, stride=2), nn.GELU(), nn.AvgPool1d(2)), normal(2, 4, 12))
whole("conv3d", lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.ELU(), nn.MaxPool3d(2)), normal(1, 1, 4, 4, 4))
whole("transposed", lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride=2), nn.Tanh()), normal(1, 2, 3, 3))
whole(
    "depthwise",
    lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.Conv2d(8, 6, 1), nn.Hardswish()),
    normal(2, 8, 5, 5),
)
whole("same_padding", lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding="same"), nn.LeakyReLU(0.2)), normal(1, 2, 4, 4))
whole("circular_padding", lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), normal(1, 4, 6))
whole("super_resolution", lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.PixelShuffle(2), nn.PReLU()), normal(1, 8, 3, 3))
whole(
    "upsample",
    lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 1)),
    normal(1, 8, 3, 3),
)
whole(
    "group_norm",
    lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 2, 1)),
    normal(2, 8, 3, 3),
)
whole("instance_norm", lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.InstanceNorm2d(4, affine=True)), normal(2, 8, 3, 3))
whole(
    "layer_norm",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Softmax(-1)),
    normal(2, 3, 8),
)
whole("rms_norm", lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)), normal(2, 8))
whole(
    "batch_norm1d",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 8)),
    normal(3, 8),
    modes=BOTH,
)
whole("bilinear", lambda: nn.Bilinear(3, 8, 2), normal(2, 3), normal(2, 8))
whole("embedding_bag", lambda: nn.Sequential(nn.EmbeddingBag(9, 8), nn.Linear(8, 2)), ints(9, 2, 3))
whole(
    "reflection", lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(1, 1, 3), nn.ZeroPad2d(1)), normal(1, 1, 3, 3)
)
whole(
    "dropouts",
    lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.Dropout2d(), nn.Flatten(), nn.AlphaDropout(), nn.Linear(16, 2)),
    normal(2, 8, 2, 2),
    modes=BOTH,
)
whole("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), normal(2, 8))

# -- recurrence -------------------------------------------------------------------------------------------------------

whole("lstm", lambda: nn.LSTM(8, 3, num_layers=2, batch_first=True), normal(2, 5, 8))
whole("gru", lambda: nn.GRU(8, 3, bidirectional=True), normal(5, 2, 8))
whole("rnn", lambda: nn.RNN(8, 3, batch_first=True), normal(2, 5, 8))


@small(ints(9, 2, 5), embed=lambda: nn.Embedding(9, 8), lstm=lambda: nn.LSTM(8, 8, batch_first=True), out=lin(8, 9))
def language_model(self: Any, tokens: Tensor) -> Any:
    y, (h, _) = self.lstm(self.embed(tokens))
    return {"logits": self.out(y), "hidden": h}


@small(normal(2, 8), normal(2, 3), cell=lambda: nn.GRUCell(8, 3))
def gru_cell(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return self.cell(x, h)


@small(normal(2, 8), cell=lambda: nn.LSTMCell(8, 3))
def lstm_cell(self: Any, x: Tensor) -> Tensor:
    h, c = self.cell(x)
    h, c = self.cell(x, (h, c))
    return h + c


@small(normal(4, 2, 8), a=lin(), b=lin(), deferred=True)
def loop_over_length(self: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[0])
    for i in range(x.shape[0]):
        h = torch.tanh(self.a(x[i]) + self.b(h))
    return h


# -- attention --------------------------------------------------------------------------------------------------------


@small(normal(2, 8, 16), norm=lambda: nn.LayerNorm(16), qkv=lin(16, 48), out=lin(16, 16))
def attention(self: Any, x: Tensor) -> Tensor:
    b, t, c = x.shape
    q, k, v = (u.view(b, t, 2, c // 2).transpose(1, 2) for u in self.qkv(self.norm(x)).chunk(3, dim=-1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(c // 2)
    return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


@small(normal(2, 5, 8), q=lin(8, 8), k=lin(8, 8), v=lin(8, 8))
def fused_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = (m(x).unflatten(-1, (2, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@small(normal(1, 8, 8), q=lin(), k=lin(), causal=lambda: torch.ones(10, 10).tril() == 0)
def causal_attention(self: Any, x: Tensor) -> Tensor:
    t = x.size(1)
    scores = torch.matmul(self.q(x), self.k(x).mT) * 8**-0.5
    return torch.softmax(scores.masked_fill(self.causal[:t, :t], float("-inf")), dim=-1) @ x


@small(normal(2, 4, 8), normal(2, 8, 8), bools(2, 1, 8), q=lin(), kv=lin(8, 16))
def cross_attention(self: Any, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    k, v = self.kv(memory).split(8, dim=-1)
    scores = torch.einsum("bqd,bkd->bqk", self.q(x), k)
    return torch.einsum("bqk,bkd->bqd", scores.masked_fill(~mask, -1e4).softmax(dim=-1), v)


@small(normal(2, 8, 16), attention=lambda: nn.MultiheadAttention(16, 2, batch_first=True))
def multihead(self: Any, x: Tensor) -> Tensor:
    return self.attention(x, x, x, need_weights=False)[0]


whole(
    "transformer_layer",
    lambda: nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0),
    normal(2, 8, 16),
)


@small(normal(8, 8), normal(8, 8))
def attention_of_inputs(self: Any, q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ k


# -- how values join and part -----------------------------------------------------------------------------------------


@small(normal(2, 8), a=lin(), b=lin())
def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.b(F.relu(self.a(x)))


@small(normal(2, 8), normal(2, 8), a=lin(), b=lin(16, 3))
def two_inputs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.b(torch.cat([self.a(x), y], dim=1))


@small(normal(2, 8), a=lin(), b=lin())
def dict_output(self: Any, x: Tensor) -> dict[str, Any]:
    y = self.a(x)
    return {"y": y, "more": [self.b(y), (x, 2.5, None)]}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@small(normal(2, 8), a=lin(), b=lin())
def named_tuple_output(self: Any, x: Tensor) -> Pair:
    return Pair(self.a(x), self.b(x).argmax(-1))


@small(lambda: {"x": torch.randn(2, 8), "y": torch.randn(2, 8)}, a=lin(), b=lin(), deferred=True)
def dict_input(self: Any, batch: Any) -> Tensor:
    return self.a(batch["x"]) * self.b(batch["y"])


@small(normal(2, 8), a=lin(8, 16), b=lin(8, 3))
def chunks(self: Any, x: Tensor) -> Tensor:
    gate, value = torch.chunk(self.a(x), 2, dim=-1)
    return self.b(torch.sigmoid(gate) * value)


@small(normal(2, 3, 8), a=lin(), b=lin())
def stacks(self: Any, x: Tensor) -> Tensor:
    return torch.stack([self.a(x), self.b(x), x], dim=1).mean(1)


@small(normal(2, 3, 8), a=lin())
def unbinds(self: Any, x: Tensor) -> Tensor:
    first, second, third = self.a(x).unbind(1)
    return first * second - third


@small(normal(2, 8), a=lin(8, 8))
def split_sizes(self: Any, x: Tensor) -> Tensor:
    u, v = torch.split(self.a(x), [3, 5], dim=1)
    return torch.cat((v, u), 1)


@small(normal(2, 4, 8), a=lin())
def shuffled_views(self: Any, x: Tensor) -> Tensor:
    y = self.a(x).permute(0, 2, 1).contiguous().view(x.size(0), -1)
    return y.unsqueeze(1).expand(-1, 3, -1).flip(1).repeat(1, 1, 2).squeeze(0).roll(1, dims=-1)


@small(normal(2, 8), a=lin(), b=lin(), kwargs={"scale": lambda: 3.0})
def keyword_only(self: Any, x: Tensor, *, scale: float = 2.0) -> Tensor:
    return self.b(self.a(x) * scale)


@small(kwargs={"x": normal(2, 8), "y": normal(2, 8)}, a=lin())
def keywords_alone(self: Any, *, x: Tensor, y: Tensor) -> Tensor:
    return self.a(x) / (y.abs() + 1)


@small(normal(2, 8), lambda: None, a=lin())
def optional_none(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = self.a(x)
    return y if mask is None else y * mask


@small(normal(2, 8), bools(2, 8), a=lin())
def optional_given(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = self.a(x)
    return y if mask is None else y.masked_fill(mask, 0.0)


# -- state, tying, structure ------------------------------------------------------------------------------------------


@small(normal(2, 8), a=lin(), scale=lambda: torch.rand(8), table=lambda: torch.arange(8))
def buffers(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * self.scale + self.table


@small(normal(2, 8), a=lin(), average=lambda: torch.zeros(8))
def moving_average(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - self.average


@small(ints(7, 2, 3), embed=lambda: nn.Embedding(7, 8, padding_idx=0), a=lin())
def tied(self: Any, tokens: Tensor) -> Tensor:
    return F.linear(self.a(self.embed(tokens)), self.embed.weight)


@small(normal(2, 8), layers=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
def module_list(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        x = F.silu(layer(x)) if i % 2 else layer(x) + x
    return x


@small(normal(2, 8), heads=lambda: nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)}))
def module_dict(self: Any, x: Tensor) -> dict[str, Tensor]:
    return {name: head(x) for name, head in self.heads.items()}


@small(normal(2, 8), weights=lambda: nn.ParameterList([torch.randn(8, 8), torch.randn(8, 8)]))
def parameter_list(self: Any, x: Tensor) -> Tensor:
    for w in self.weights:
        x = torch.mm(x, w).tanh()
    return x


@small(normal(2, 8), a=lin(), b=lin(), modes=BOTH)
def by_mode(self: Any, x: Tensor) -> Tensor:
    return F.dropout(self.a(x), 0.3, self.training) if self.training else self.b(self.a(x)).exp()


@small(normal(2, 8), w=weight(8, 8), b=weight(8))
def plain_parameters(self: Any, x: Tensor) -> Tensor:
    return torch.addmm(self.b, x, self.w.t()) @ self.w


@small(normal(2, 8), a=lin())
def called_twice(self: Any, x: Tensor) -> Tensor:
    return self.a(torch.relu(self.a(x)))


# -- masks, indices, choices ------------------------------------------------------------------------------------------


@small(normal(2, 8), a=lin())
def top_k(self: Any, x: Tensor) -> Any:
    values, indices = torch.topk(self.a(x), 2, dim=-1)
    return values.softmax(-1), indices


@small(normal(2, 8), a=lin())
def largest(self: Any, x: Tensor) -> Any:
    best = self.a(x).max(dim=-1)
    return best.values, best.indices


@small(normal(2, 8), ints(8, 2, 3), a=lin())
def gathers(self: Any, x: Tensor, index: Tensor) -> Tensor:
    return self.a(x).gather(1, index)


@small(normal(2, 8), ints(5, 2, 3), a=lin(8, 3))
def scatters(self: Any, x: Tensor, index: Tensor) -> Tensor:
    y = self.a(x)
    return torch.zeros(2, 5).scatter_add(1, index, y)


@small(normal(2, 8), a=lin())
def cumulates(self: Any, x: Tensor) -> Tensor:
    return torch.cumsum(self.a(x), dim=1).clamp(-5, 5)


@small(normal(2, 8), normal(2, 8), a=lin())
def chooses(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self.a(x)
    return torch.where(z > y, z, torch.zeros_like(z))


@small(normal(2, 8), bools(2, 8), a=lin(), b=lin())
def masks(self: Any, x: Tensor, keep: Tensor) -> Tensor:
    y = self.a(x).masked_fill(~keep, float("-inf"))
    return self.b(F.softmax(y, dim=-1).nan_to_num(0.0))


@small(normal(2, 4, 8), a=lin())
def indexes(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return y[:, 1:, 0] + y[..., -1][:, :3] * y[:, None, 2, 1]


@small(normal(2, 8), a=lin())
def item_assignment(self: Any, x: Tensor) -> Tensor:
    y = self.a(x).clone()
    y[:, 0] = 1.0
    y[0] = x[1]
    return y * 2


@small(normal(2, 8), a=lin())
def fills_a_new_tensor(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 8)
    out[:, :7] = self.a(x)[:, 1:]
    return out + x


@small(normal(2, 8), a=lin())
def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y += 1.0
    y.mul_(2.0).add_(x)
    y[:, 1] -= 3.0
    return y


@small(ints(5, 2, 3), embed=lambda: nn.Embedding(5, 8), position=lambda: nn.Embedding(6, 8), a=lin())
def positions(self: Any, tokens: Tensor) -> Tensor:
    place = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
    return self.a(self.embed(tokens) + self.position(place))


@small(ints(8, 2, 3), a=lin(8, 4))
def one_hot(self: Any, tokens: Tensor) -> Tensor:
    return self.a(F.one_hot(tokens, 8).float())


@small(normal(2, 8), a=lin(), ids=lambda: torch.tensor([2, 0]))
def picks_rows(self: Any, x: Tensor) -> Tensor:
    return self.a(x).index_select(1, self.ids)


# -- losses -----------------------------------------------------------------------------------------------------------


@small(normal(3, 8), ints(8, 3), a=lin())
def classifies(self: Any, x: Tensor, target: Tensor) -> Any:
    logits = self.a(x)
    return F.cross_entropy(logits, target, label_smoothing=0.1), logits


@small(normal(3, 8), normal(3, 8), a=lin())
def regresses(self: Any, x: Tensor, target: Tensor) -> Tensor:
    y = self.a(x)
    return F.mse_loss(y, target) + F.smooth_l1_loss(y, target) + F.l1_loss(y, target, reduction="sum")


@small(normal(3, 8), lambda: torch.rand(3, 8), a=lin(), loss=lambda: nn.BCEWithLogitsLoss())
def binary(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return self.loss(self.a(x), target)


@small(normal(8, 8), normal(8, 8), a=lin(), b=lin())
def contrastive(self: Any, x: Tensor, y: Tensor) -> Tensor:
    u, v = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
    return -torch.diag(F.log_softmax(u @ v.t() / 0.1, dim=1)).mean()


@small(normal(3, 8), a=lin(), b=lin(), c=lin())
def variational(self: Any, x: Tensor) -> Tensor:
    mean, log_variance = self.a(x), self.b(x)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return ((self.c(z) - x) ** 2).sum() + kl


# -- dtypes -----------------------------------------------------------------------------------------------------------


@small(normal(2, 8), a=lin(), b=lin())
def float_island(self: Any, x: Tensor) -> Tensor:
    y = self.a(x).float()
    return self.b((y * y).mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype) * y)


@small(lambda: torch.randn(2, 8, dtype=torch.float64), a=lambda: nn.Linear(8, 8).double(), b=lin())
def double_path(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).float()) + x.float()


@small(normal(2, 8), a=lin(8, 14), b=lin())
def spectrum(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.fft.rfft(self.a(x)).abs())


@small(normal(2, 3, 8), a=lin())
def rotary(self: Any, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(self.a(x).reshape(2, 3, 4, 2))
    angles = torch.polar(torch.ones(3, 4), torch.arange(12.0).view(3, 4))
    return torch.view_as_real(pairs * angles).flatten(2)


@small(lambda: torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8), conv=lambda: nn.Conv2d(3, 2, 3))
def image(self: Any, pixels: Tensor) -> Tensor:
    return self.conv(pixels.float() / 255)


@small(normal(2, 8), a=lin())
def reflected_arithmetic(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return (1 - y) * (2 / (3 + y * y)) + 2 ** (-y) + y % 2


@small(normal(2, 8), a=lin())
def comparisons(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    both = (y > 0) & (x < 1) | ~(y != y)
    return both, both.any(), (y >= x.mean()).sum(), y.argsort(-1)


# -- functions --------------------------------------------------------------------------------------------------------


@small(normal(2, 8), a=lin(), b=lin())
def straight_through(self: Any, x: Tensor) -> Tensor:
    return self.b(Straight.apply(self.a(x)))


@torch.library.custom_op("small_models::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad + grad)


@small(normal(2, 8), a=lin(), b=lin())
def custom_operator(self: Any, x: Tensor) -> Tensor:
    return self.b(twice(self.a(x)))


@small(normal(1, 8, 4, 4), conv=lambda: nn.Conv2d(8, 2, 1))
def resizes(self: Any, x: Tensor) -> Tensor:
    y = F.interpolate(self.conv(x), scale_factor=2.0, mode="bilinear", align_corners=False)
    return F.avg_pool2d(F.pad(y, (1, 1, 0, 0)), 2)


@small(
    normal(2, 4, 6, 6),
    down=lambda: nn.Conv2d(4, 2, 3, 2, 1),
    up=lambda: nn.ConvTranspose2d(2, 4, 2, 2),
    out=lambda: nn.Conv2d(8, 1, 1),
)
def u_net(self: Any, x: Tensor) -> Tensor:
    return self.out(torch.cat([x, self.up(F.leaky_relu(self.down(x), 0.1))], dim=1))


@small(normal(2, 8), a=lin(), b=lin())
def gated(self: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(self.a(x))
    return torch.lerp(x, self.b(x), gate) + torch.addcmul(x, gate, gate, value=0.5)


@small(normal(2, 8), a=lin(), b=lin())
def statistics(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    z = (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1e-5)
    return self.b(z * torch.norm(y, dim=-1, keepdim=True)).logsumexp(-1)


@small(normal(2, 3, 8), normal(2, 8, 8), w=weight(8, 3))
def products(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, y)
    return torch.tensordot(z, self.w, dims=1).sum(dim=(1, 2), keepdim=True) + torch.baddbmm(z, x, y)[:, :1, :1]


@small(normal(2, 8), a=lin(), deferred=True)
def no_grad_region(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    with torch.no_grad():
        scale = y.abs().mean()
    return y / (scale + 1)


@small(normal(2, 8), a=lin(), deferred=True)
def shape_branch(self: Any, x: Tensor) -> Tensor:
    return self.a(x) if x.shape[0] > 1 else self.a(x) * 2


@small(normal(2, 8), a=lin())
def finfo(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return y.masked_fill(y < 0, torch.finfo(y.dtype).min).softmax(-1)


@small(normal(2, 8), a=lin())
def list_of_layers(self: Any, x: Tensor) -> list[Tensor]:
    found = [x]
    for _ in range(3):
        found.append(self.a(found[-1]).tanh())
    return found


@small(normal(2, 3, 8), score=lin(8, 1), a=lin())
def pooling(self: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(self.score(x).squeeze(-1), dim=-1)
    return (weights.unsqueeze(-1) * self.a(x)).sum(1)


@small(normal(3, 8), experts=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), gate=lin(8, 2))
def experts(self: Any, x: Tensor) -> Tensor:
    gates = F.softmax(self.gate(x), dim=-1)
    return sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@small(normal(4, 8), ints(4, 2, 6), a=lin())
def graph_convolution(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges[0], edges[1]
    return torch.zeros_like(x).index_add(0, target, self.a(x)[source]).relu()


@small(
    normal(1, 3, 8, 8),
    patches=lambda: nn.Conv2d(3, 8, 4, 4),
    token=weight(1, 1, 8),
    position=weight(1, 5, 8),
    head=lin(8, 2),
)
def vision(self: Any, x: Tensor) -> Tensor:
    y = self.patches(x).flatten(2).transpose(1, 2)
    y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], dim=1) + self.position
    return self.head(y[:, 0])


@small(normal(2, 8, 3), conv=lambda: nn.Conv2d(8, 2, 1))
def unbatched(self: Any, x: Tensor) -> Tensor:
    return self.conv(x.unsqueeze(-1))
