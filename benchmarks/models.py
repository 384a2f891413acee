"""Models at full size on the meta device: no weights are allocated, and nothing can be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH = 8


@dataclass(frozen=True)
class FullModel:
    """A model in training mode, and the keyword inputs of a call."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


class _Block(nn.Module):
    """Convolutions with a residual connection: 1x1, 3x3 and 1x1, or two of 3x3; the first 3x3 has the stride."""

    def __init__(self, before: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        after = expansion * width
        if expansion > 1:
            self.way = nn.Sequential(
                *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
                *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
                *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
            )
        else:
            self.way = nn.Sequential(
                *(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
                *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
            )
        fits = stride == 1 and before == after
        shortcut = (nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = nn.Identity() if fits else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.way(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """The residual network (He et al. 2015, stride in the 3x3 convolution), with its loss.

    Args:
        blocks: number of blocks in each stage.
        width: channels inside the first stage's blocks.
        classes: number of classes.
        expansion: a block's output channels divided by its inner channels; above 1 it is a bottleneck.
    """

    def __init__(self, blocks: tuple[int, ...], width: int = 64, classes: int = 1000, expansion: int = 1) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
        before = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(_Block(before, width << stage, 2 if stage and not i else 1, expansion))
                before = expansion * (width << stage)
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(before, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classify(self.features(pixel_values).mean((2, 3)))
        return nn.functional.cross_entropy(logits, labels), logits


class ResNet50(ResNet):
    """The residual network of 50 layers, with bottleneck blocks; arguments as for :class:`ResNet`."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__(blocks, width, classes, expansion=4)


def _images(batch: int = BATCH) -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}


def _tokens(length: int) -> dict[str, Tensor]:
    ids, mask, labels = (torch.ones(BATCH, length, dtype=torch.long) for _ in range(3))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _unlabelled(length: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tokens(length).items() if name != "labels"}


def _unmasked(length: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tokens(length).items() if name != "attention_mask"}


def _bert(attention: str) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(attn_implementation=attention))


def _gpt2(attention: str) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, attn_implementation=attention))


# "eager" writes attention out: products, softmax, dropout.
MODELS: dict[str, FullModel] = {
    "ResNet-50": FullModel(ResNet50, _images),
    "ViT-B/16": FullModel(
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)), _images
    ),
    "BERT-base": FullModel(lambda: _bert("sdpa"), lambda: _tokens(512)),
    "BERT-base no loss": FullModel(lambda: _bert("sdpa"), lambda: _unlabelled(512)),
    "BERT-base eager": FullModel(lambda: _bert("eager"), lambda: _tokens(512)),
    "GPT-2": FullModel(lambda: _gpt2("sdpa"), lambda: _unmasked(1024)),
    "GPT-2 eager": FullModel(lambda: _gpt2("eager"), lambda: _unmasked(1024)),
}


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))


def _convnext() -> nn.Module:
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=1000))


def _t5() -> nn.Module:
    config = transformers.T5Config(use_cache=False, pad_token_id=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def _llama() -> nn.Module:
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
    config = transformers.LlamaConfig(**sizes, use_cache=False)  # type: ignore[arg-type]
    return transformers.LlamaForCausalLM(config)


# For the memory of training; BERT and GPT-2 write attention out.
TRAINED: dict[str, FullModel] = {
    "ResNet-50 b32": FullModel(ResNet50, lambda: _images(32)),
    "ViT-B/16 b32": FullModel(_vit, lambda: _images(32)),
    "ConvNeXt-T b32": FullModel(_convnext, lambda: _images(32)),
    "BERT-base b8 s512": FullModel(lambda: _bert("eager"), lambda: _tokens(512)),
    "GPT-2 b8 s1024": FullModel(lambda: _gpt2("eager"), lambda: _unmasked(1024)),
    "T5-small b8 s512": FullModel(_t5, lambda: _tokens(512)),
    "Llama 12x768 b8 s1024": FullModel(_llama, lambda: _unmasked(1024)),
}
