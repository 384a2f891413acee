"""Whole models in training: torch_autocast_cpu gives torch.autocast's outputs and gradients, bit for bit."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autocastfx
from tests.helpers import with_low_lstm

BFLOAT16 = torch.bfloat16


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding="valid"), nn.BatchNorm2d(8)
        self.block, self.head = Residual(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.block(F.max_pool2d(F.relu(self.norm(self.stem(x))), 2))
        logits = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits, F.cross_entropy(logits, labels)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.leaky_relu(self.down(x))
        y = F.leaky_relu(self.middle(F.avg_pool2d(skip, 4)))
        y = F.interpolate(self.up(y), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.out(torch.cat([y, skip], 1)).sigmoid()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(12, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0][:, -1]).log_softmax(-1)


class Gated(nn.Module):
    """A GRU, whose gates torch unrolls, on 16-bit inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gru = nn.Linear(8, 8), nn.GRU(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.before(x))[0]


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.randn(1, 1, 16))
        self.place, self.norm, self.head = nn.Parameter(torch.randn(1, 5, 16)), nn.LayerNorm(16), nn.Linear(16, 3)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.head(self.norm(x + self.out(y.transpose(1, 2).flatten(2)))[:, 0])


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.time = nn.GroupNorm(2, 8), nn.Linear(6, 8)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None].float() * torch.exp(-torch.arange(3, device=t.device) / 3)
        scale = self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        y = F.silu(self.norm(self.first(F.silu(self.norm(x))) + scale))
        return x + self.second(F.dropout(y, 0.1, self.training))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Parameter(torch.randn(5, 5) / 3), nn.Parameter(torch.randn(8, 8) / 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.gelu(torch.einsum("bnc,nm->bmc", self.norm(x), self.tokens))
        return x + torch.tensordot(F.gelu(self.norm(x)), self.channels, dims=1)


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv1d(1, 8, 5, stride=2), nn.Conv1d(8, 8, 3, padding="same")
        self.slope, self.norm = nn.PReLU(), nn.InstanceNorm1d(8, affine=True)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 16, window=self.window, return_complex=True).abs().mean()
        return self.norm(self.slope(self.deep(F.pad(self.wide(x[:, None]), (1, 1), mode="reflect")))) * spectrum


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)


class Logits(nn.Module):
    """A model of transformers, of which one output counts."""

    def __init__(self, kind: str, **config: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        small = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        self.model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**small, **config))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, return_dict=False)[0]


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Logits("BertModel", **sizes)


def gpt2() -> nn.Module:
    return Logits("GPT2LMHeadModel", n_embd=16, n_layer=1, n_head=2, use_cache=False)


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Logits("LlamaForCausalLM", **sizes, use_cache=False, attn_implementation="eager")


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def ids() -> torch.Tensor:
    return torch.randint(3, 20, (2, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "resnet": (ResNet, lambda: (images(), torch.tensor([1, 3]))),
    "unet": (UNet, lambda: (images(),)),
    "lstm": (Recurrent, lambda: (ids(),)),
    "gru": (Gated, lambda: (torch.randn(4, 2, 8),)),
    "encoder": (encoder, lambda: (torch.randn(2, 5, 16),)),
    "vit": (ViT, lambda: (images(),)),
    "diffusion": (Diffusion, lambda: (torch.randn(2, 8, 4, 4), torch.tensor([3, 7]))),
    "mixer": (Mixer, lambda: (torch.randn(2, 5, 8),)),
    "audio": (Audio, lambda: (torch.randn(2, 40),)),
    "bert": (bert, lambda: (ids(),)),
    "gpt2": (gpt2, lambda: (ids(),)),
    "llama": (llama, lambda: (ids(),)),
}


# Zeros that the model makes in the dtype of another value are made in float32 here, and cast.
MADE = {"gru": 1}


class Casts(TorchDispatchMode):
    """Counts the casts that change a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype != result.dtype:
            self.counted[args[0].dtype, result.dtype] += 1
        return result


def trained(
    run: nn.Module, model: nn.Module, inputs: tuple[torch.Tensor, ...], region: contextlib.AbstractContextManager[Any]
) -> tuple[dict[str, torch.Tensor | None], Counter[tuple[torch.dtype, torch.dtype]]]:
    """Outputs, gradients and buffers of one pass forwards and backwards of ``run``, and the casts of its forward.

    ``run`` has the state of ``model``, which is put back.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with Casts() as casts, region:
        outputs = pytree.tree_leaves(run(*inputs))
    weights = [torch.linspace(0.5, 1, o.numel()).view_as(o) for o in outputs]
    sum((o.float() * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    found: dict[str, torch.Tensor | None] = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(state)
    return found, casts.counted


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=with_low_lstm) if name == "lstm" else name for name in MODELS]
)
def test_training_is_torch_autocasts(name: str) -> None:
    torch.manual_seed(0)
    make, make_inputs = MODELS[name]
    model, inputs = make(), make_inputs()
    amp_model = autocastfx.convert(model, inputs, dtype=BFLOAT16, op_list="torch_autocast_cpu", keep_output_dtype=False)
    expected, expected_casts = trained(model, model, inputs, torch.autocast("cpu", dtype=BFLOAT16))
    result, casts = trained(amp_model, model, inputs, contextlib.nullcontext())
    assert sum(casts.values()) >= len(amp_model.plan.casts) > 0
    casts[torch.float32, BFLOAT16] -= MADE.get(name, 0)
    assert casts == expected_casts
    assert result.keys() == expected.keys()
    for key, wanted in expected.items():
        found = result[key]
        assert (found is None) == (wanted is None), key
        if found is not None and wanted is not None:
            assert found.dtype == wanted.dtype, key
            assert torch.equal(found, wanted), key
