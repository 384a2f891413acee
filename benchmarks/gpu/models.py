"""The models that ``benchmarks.gpu`` trains: of usual sizes, and tiny ones to test the command itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models import FullModel, ResNet, ResNet50
from benchmarks.small_models import SMALL, UNet

__all__ = ["MODELS", "built", "without_dropout"]

Inputs = dict[str, Tensor]


def _tokens(batch: int, length: int, vocabulary: int, *, masked: bool = False) -> Inputs:
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
    return {"input_ids": ids, "labels": ids.clone(), **mask}


def _images(batch: int, side: int, classes: int = 1000) -> Inputs:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, side, side, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (batch,), generator=random)}


def _segmented(batch: int, side: int) -> Inputs:
    labels = torch.randint(3, (batch, side, side), generator=torch.Generator().manual_seed(1))
    return {**_images(batch, side), "labels": labels}


def _bert(width: int, layers: int, heads: int, vocabulary: int = 30522) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = transformers.BertConfig(**sizes, intermediate_size=4 * width, vocab_size=vocabulary)
    return transformers.BertForMaskedLM(config)


def _gpt2(width: int, layers: int, heads: int, dropout: float = 0.1) -> nn.Module:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": heads, **drops}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))


def _vit(width: int, layers: int, heads: int) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, intermediate_size=4 * width, num_labels=1000)
    )


def _llama() -> nn.Module:
    """The sizes of TinyLlama, of 1.1 billion parameters."""
    sizes: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632}
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    special: dict[str, Any] = {"pad_token_id": 0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special, use_cache=False))


def _convnext() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3]}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes, num_labels=1000))


def _channels_last(build: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> FullModel:
    def images() -> Inputs:
        found = inputs()
        return {**found, "pixel_values": found["pixel_values"].contiguous(memory_format=torch.channels_last)}

    return FullModel(lambda: build().to(memory_format=torch.channels_last), images)  # type: ignore[call-overload]


MODELS: dict[str, FullModel] = {
    **SMALL,
    "BERT-large b32 s512": FullModel(lambda: _bert(1024, 24, 16), lambda: _tokens(32, 512, 30522, masked=True)),
    "GPT-2 medium b8 s1024": FullModel(lambda: _gpt2(1024, 24, 16), lambda: _tokens(8, 1024, 50257)),
    "GPT-2 medium b8 s1024, no dropout": FullModel(
        lambda: _gpt2(1024, 24, 16, dropout=0), lambda: _tokens(8, 1024, 50257)
    ),
    "ViT-L b64": FullModel(lambda: _vit(1024, 24, 16), lambda: _images(64, 224)),
    "ResNet-50 b256": _channels_last(ResNet50, lambda: _images(256, 224)),
    "Llama 1.1B b4 s2048": FullModel(_llama, lambda: _tokens(4, 2048, 32000)),
    "T5-base b16 s512": FullModel(_t5, lambda: _tokens(16, 512, 32128, masked=True)),
    "ConvNeXt-B b128": _channels_last(_convnext, lambda: _images(128, 224)),
    "U-Net 256 b16": _channels_last(lambda: UNet(64, 4), lambda: _segmented(16, 256)),
    "BERT-base b32 s512": FullModel(lambda: _bert(768, 12, 12), lambda: _tokens(32, 512, 30522, masked=True)),
    "GPT-2 b8 s1024": FullModel(lambda: _gpt2(768, 12, 12), lambda: _tokens(8, 1024, 50257)),
    "ViT-B b64": FullModel(lambda: _vit(768, 12, 12), lambda: _images(64, 224)),
    "BERT tiny": FullModel(lambda: _bert(16, 1, 2, 32), lambda: _tokens(2, 8, 32, masked=True)),
    "ResNet tiny": _channels_last(lambda: ResNet((1,), width=8, classes=4), lambda: _images(2, 16, 4)),
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
