"""Models at full size on the meta device: no weights are allocated, and nothing can be computed."""

from __future__ import annotations

from functools import partial

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models.families import FullModel, ResNet50, bert, gpt2, llama, t5, vit

BATCH = 8


def _images(batch: int = BATCH) -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}


def _tokens(length: int) -> dict[str, Tensor]:
    ids, mask, labels = (torch.ones(BATCH, length, dtype=torch.long) for _ in range(3))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _unlabelled(length: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tokens(length).items() if name != "labels"}


def _unmasked(length: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tokens(length).items() if name != "attention_mask"}


_EAGER_BERT, _EAGER_GPT2 = (partial(family, attn_implementation="eager") for family in (bert, gpt2))

# "eager" writes attention out: products, softmax, dropout.
MODELS: dict[str, FullModel] = {
    "ResNet-50": FullModel(ResNet50, _images),
    "ViT-B/16": FullModel(vit, _images),
    "BERT-base": FullModel(bert, lambda: _tokens(512)),
    "BERT-base no loss": FullModel(bert, lambda: _unlabelled(512)),
    "BERT-base eager": FullModel(_EAGER_BERT, lambda: _tokens(512)),
    "GPT-2": FullModel(gpt2, lambda: _unmasked(1024)),
    "GPT-2 eager": FullModel(_EAGER_GPT2, lambda: _unmasked(1024)),
}


def _convnext() -> nn.Module:
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=1000))


# For the memory of training; BERT and GPT-2 write attention out.
TRAINED: dict[str, FullModel] = {
    "ResNet-50 b32": FullModel(ResNet50, lambda: _images(32)),
    "ViT-B/16 b32": FullModel(vit, lambda: _images(32)),
    "ConvNeXt-T b32": FullModel(_convnext, lambda: _images(32)),
    "BERT-base b8 s512": FullModel(_EAGER_BERT, lambda: _tokens(512)),
    "GPT-2 b8 s1024": FullModel(_EAGER_GPT2, lambda: _unmasked(1024)),
    "T5-small b8 s512": FullModel(partial(t5, 512, 6, 8), lambda: _tokens(512)),
    "Llama 12x768 b8 s1024": FullModel(partial(llama, 768, 12, 12, 2048), lambda: _unmasked(1024)),
}
