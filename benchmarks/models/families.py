"""Model families of any size, each call of which returns the loss first, and numbers to call them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Tensor]
# Masks are drawn alike in all precisions only on some devices.
STILL_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STILL_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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


def bert(width: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = 30522, **options: Any) -> nn.Module:
    """BERT with a masked language model's head; by default of the base size."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**sizes, "intermediate_size": 4 * width, **options}))


def gpt2(width: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = 50257, **options: Any) -> nn.Module:
    """GPT-2; by default of its first size."""
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **{"use_cache": False, **options}))


def llama(width: int, layers: int, heads: int, inner: int, vocabulary: int = 32000, **options: Any) -> nn.Module:
    """Llama, with ``inner`` features inside of its MLPs."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    numbers: dict[str, Any] = {"num_attention_heads": heads, "vocab_size": vocabulary, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **numbers, **options))


def t5(width: int, layers: int, heads: int, vocabulary: int = 32128, **options: Any) -> nn.Module:
    """T5 with as many layers in the encoder as in the decoder."""
    sizes: dict[str, Any] = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_heads": heads}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "use_cache": False}
    config = transformers.T5Config(**sizes, **special, num_layers=layers, vocab_size=vocabulary, **options)
    return transformers.T5ForConditionalGeneration(config)


def vit(width: int = 768, layers: int = 12, heads: int = 12, classes: int = 1000, **options: Any) -> nn.Module:
    """ViT with a classifier; by default of the base size."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = transformers.ViTConfig(**sizes, **{"intermediate_size": 4 * width, **options}, num_labels=classes)
    return transformers.ViTForImageClassification(config)


def tokens(batch: int, length: int, vocabulary: int, *, masked: bool = False, padded: bool = False) -> Inputs:
    """Return token ids and labels, and a mask that hides nothing, or the ends of every second row.

    Padded, such a row ends earlier by 1/8 of the length and more. A mask that hides nothing is dropped by transformers
    in an eager call, and kept in a captured graph.
    """
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    if not padded:
        mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
        return {"input_ids": ids, "labels": ids.clone(), **mask}
    ends = torch.tensor([length if row % 2 else length - length // 8 - row % (length // 4) for row in range(batch)])
    shown = (torch.arange(length) < ends[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(shown == 0, -100), "attention_mask": shown}


def images(batch: int, side: int, classes: int = 1000) -> Inputs:
    """Return images in three channels, and their classes."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, side, side, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (batch,), generator=random)}
