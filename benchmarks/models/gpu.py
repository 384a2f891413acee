"""The models that ``benchmarks.gpu`` trains: of usual sizes, and tiny ones to test the command itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.families import FullModel, Inputs, ResNet, ResNet50, bert, gpt2, images, llama, t5, tokens, vit
from benchmarks.models.small import SMALL


class _Perceptron(nn.Module):
    """Small enough to be compiled in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (nn.functional.cross_entropy(self.layers(x), labels),)


def _numbers() -> Inputs:
    random = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 16, generator=random), "labels": torch.randint(4, (8,), generator=random)}


def _channels_last(build: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> FullModel:
    def laid_out() -> Inputs:
        found = inputs()
        return {**found, "pixel_values": found["pixel_values"].contiguous(memory_format=torch.channels_last)}

    return FullModel(lambda: build().to(memory_format=torch.channels_last), laid_out)  # type: ignore[call-overload]


def _bert_of(batch: int, length: int, *sizes: int, padded: bool = False) -> FullModel:
    return FullModel(partial(bert, *sizes), lambda: tokens(batch, length, 30522, padded=padded))


def _gpt2_of(batch: int, *sizes: int, **options: Any) -> FullModel:
    return FullModel(partial(gpt2, *sizes, **options), lambda: tokens(batch, 1024, 50257))


def _llama_of(batch: int, length: int, layers: int) -> FullModel:
    """The sizes of TinyLlama, of 1.1 billion parameters with 22 layers."""
    made = partial(llama, 2048, layers, 32, 5632, num_key_value_heads=4)
    return FullModel(made, lambda: tokens(batch, length, 32000))


MODELS: dict[str, FullModel] = {
    **SMALL,
    "BERT-large b32 s512": _bert_of(32, 512, 1024, 24, 16),
    "BERT-large b32 s512, padded": _bert_of(32, 512, 1024, 24, 16, padded=True),
    # Sizes of vocabularies that products take best, beside the usual ones.
    "BERT-large b32 s512, vocabulary 30528": _bert_of(32, 512, 1024, 24, 16, 30528),
    "GPT-2 medium b8 s1024, fused GELU, vocabulary 50304": _gpt2_of(
        *(8, 1024, 24, 16), 50304, activation_function="gelu_pytorch_tanh"
    ),
    "BERT-base b32 s512": _bert_of(32, 512, 768, 12, 12),
    "BERT-base b8 s512": _bert_of(8, 512, 768, 12, 12),
    "GPT-2 medium b8 s1024": _gpt2_of(8, 1024, 24, 16),
    "GPT-2 medium b8 s1024, fused GELU": _gpt2_of(8, 1024, 24, 16, activation_function="gelu_pytorch_tanh"),
    "GPT-2 b8 s1024": _gpt2_of(8, 768, 12, 12),
    "GPT-2 b4 s1024": _gpt2_of(4, 768, 12, 12),
    "Llama 1.1B b2 s2048": _llama_of(2, 2048, 22),
    "Llama 4x2048": _llama_of(2, 512, 4),
    "ResNet-50 b256": _channels_last(ResNet50, lambda: images(256, 224)),
    "ResNet-50 b32": _channels_last(ResNet50, lambda: images(32, 224)),
    "ViT-L b64": FullModel(partial(vit, 1024, 24, 16), lambda: images(64, 224)),
    "T5-base b16 s512, padded": FullModel(partial(t5, 768, 12, 12), lambda: tokens(16, 512, 32128, padded=True)),
    "BERT tiny": FullModel(partial(bert, 16, 1, 2, 32), lambda: tokens(2, 8, 32, padded=True)),
    "T5 tiny": FullModel(partial(t5, 16, 1, 2, 32), lambda: tokens(2, 8, 32, padded=True)),
    "ResNet tiny": _channels_last(lambda: ResNet((1,), width=8, classes=4), lambda: images(2, 16, 4)),
    "Llama tiny": FullModel(partial(llama, 32, 1, 4, 88, 32, num_key_value_heads=4), lambda: tokens(2, 8, 32)),
    "MLP tiny": FullModel(_Perceptron, _numbers),
}


def built(name: str, device: str, *, dropout: bool = True) -> tuple[nn.Module, Inputs]:
    """Build a model in training mode on ``device``, the same each time, and its inputs."""
    full = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = full.build().to(device).train()
    if not dropout:
        without_dropout(model)
    return model, {key: tensor.to(device) for key, tensor in full.inputs().items()}


def without_dropout(model: nn.Module) -> None:
    """Set every dropout's probability to 0: of modules, and of numbers that modules hold by such a name."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, held in vars(module).items():
            if "drop" in name and isinstance(held, float):
                setattr(module, name, 0.0)
