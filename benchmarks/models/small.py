"""Models of common families, small enough to train on a CPU; each call returns the loss first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.families import FullModel, ResNet, ResNet50, bert, gpt2, images, llama, t5, tokens, vit

BATCH, TOKENS, VOCABULARY, CLASSES = 8, 128, 4096, 100


class _DoubleConvolution(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            *(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()),
            *(nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()),
        )


class UNet(nn.Module):
    """Convolutions with group norms to lower resolutions and back, with a skip connection at each level.

    Args:
        width: channels at the full resolution, a multiple of 8; each lower level has twice as many.
        levels: number of resolutions.
    """

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(_DoubleConvolution(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_DoubleConvolution(2 * w, w) for w in reversed(widths[:-1]))
        self.classify = nn.Conv2d(width, 3, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x, skips = pixel_values, list[Tensor]()
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([widen(x), skip], 1))
        logits = self.classify(x)
        return nn.functional.cross_entropy(logits, labels), logits


def small_images(side: int) -> dict[str, Tensor]:
    return images(BATCH, side, CLASSES)


def _segmented(side: int) -> dict[str, Tensor]:
    labels = torch.randint(3, (BATCH, side, side), generator=torch.Generator().manual_seed(1))
    return {**small_images(side), "labels": labels}


def small_tokens(*, masked: bool = False) -> dict[str, Tensor]:
    return tokens(BATCH, TOKENS, VOCABULARY, masked=masked)


def small_vit(**options: Any) -> nn.Module:
    return vit(192, 4, 3, CLASSES, image_size=112, **options)


def small_bert(**options: Any) -> nn.Module:
    return bert(256, 4, 4, VOCABULARY, **options)


def small_gpt2(**options: Any) -> nn.Module:
    return gpt2(256, 4, 4, VOCABULARY, n_positions=TOKENS, bos_token_id=0, eos_token_id=0, **options)


def small_llama(**options: Any) -> nn.Module:
    return llama(256, 4, 4, 688, VOCABULARY, **options)


def _seeded(build: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return build(**options)

    return seeded


_EAGER = {"attn_implementation": "eager"}

# As transformers builds them by default, with scaled_dot_product_attention, but where "eager" says that attention is
# written out, as are GPT-2's GELU (gelu_new), and Llama's and T5's norms.
SMALL: dict[str, FullModel] = {
    "ResNet-18 112": FullModel(_seeded(lambda: ResNet((2, 2, 2, 2), classes=CLASSES)), lambda: small_images(112)),
    "ResNet-50 112": FullModel(_seeded(lambda: ResNet50(classes=CLASSES)), lambda: small_images(112)),
    "ViT 4x192": FullModel(_seeded(small_vit), lambda: small_images(112)),
    "ViT eager": FullModel(_seeded(small_vit, **_EAGER), lambda: small_images(112)),
    "BERT 4x256": FullModel(_seeded(small_bert), lambda: small_tokens(masked=True)),
    "BERT eager": FullModel(_seeded(small_bert, **_EAGER), lambda: small_tokens(masked=True)),
    "GPT-2 4x256": FullModel(_seeded(small_gpt2), small_tokens),
    "GPT-2 eager": FullModel(_seeded(small_gpt2, **_EAGER), small_tokens),
    "Llama 4x256": FullModel(_seeded(small_llama), small_tokens),
    "Llama eager": FullModel(_seeded(small_llama, **_EAGER), small_tokens),
    "T5 2+2x256": FullModel(_seeded(lambda: t5(256, 2, 4, VOCABULARY)), lambda: small_tokens(masked=True)),
    "U-Net 64": FullModel(_seeded(UNet), lambda: _segmented(64)),
}
