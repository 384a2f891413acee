"""Models of common families, small enough to train on a CPU; each call returns the loss first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models import FullModel, ResNet, ResNet50

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


def images(side: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(BATCH, 3, side, side, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (BATCH,), generator=random)}


def _segmented(side: int) -> dict[str, Tensor]:
    labels = torch.randint(3, (BATCH, side, side), generator=torch.Generator().manual_seed(1))
    return {**images(side), "labels": labels}


def tokens(*, masked: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
    return {"input_ids": ids, "labels": ids.clone(), **mask}


_WIDTH: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


def _vit(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
    config = transformers.ViTConfig(**sizes, image_size=112, num_labels=CLASSES, **options)  # type: ignore[arg-type]
    return transformers.ViTForImageClassification(config)


def bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(**_WIDTH, intermediate_size=1024, vocab_size=VOCABULARY, **options)
    return transformers.BertForMaskedLM(config)


def gpt2(**options: Any) -> nn.Module:
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **special, use_cache=False, **options)  # type: ignore[arg-type]
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **_WIDTH, intermediate_size=688, vocab_size=VOCABULARY, use_cache=False, **options
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    sizes = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 1024, "num_layers": 2, "num_decoder_layers": 2}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes, **special, vocab_size=VOCABULARY, use_cache=False)  # type: ignore[arg-type]
    return transformers.T5ForConditionalGeneration(config)


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
    "ResNet-18 112": FullModel(_seeded(lambda: ResNet((2, 2, 2, 2), classes=CLASSES)), lambda: images(112)),
    "ResNet-50 112": FullModel(_seeded(lambda: ResNet50(classes=CLASSES)), lambda: images(112)),
    "ViT 4x192": FullModel(_seeded(_vit), lambda: images(112)),
    "ViT eager": FullModel(_seeded(_vit, **_EAGER), lambda: images(112)),
    "BERT 4x256": FullModel(_seeded(bert), lambda: tokens(masked=True)),
    "BERT eager": FullModel(_seeded(bert, **_EAGER), lambda: tokens(masked=True)),
    "GPT-2 4x256": FullModel(_seeded(gpt2), tokens),
    "GPT-2 eager": FullModel(_seeded(gpt2, **_EAGER), tokens),
    "Llama 4x256": FullModel(_seeded(llama), tokens),
    "Llama eager": FullModel(_seeded(llama, **_EAGER), tokens),
    "T5 2+2x256": FullModel(_seeded(_t5), lambda: tokens(masked=True)),
    "U-Net 64": FullModel(_seeded(UNet), lambda: _segmented(64)),
}
