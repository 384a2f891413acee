"""The models that ``benchmarks.gpu`` trains: of usual sizes, and tiny ones to test the command itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models import FullModel, ResNet, ResNet50
from benchmarks.small_models import SMALL

Inputs = dict[str, Tensor]


def _tokens(batch: int, length: int, vocabulary: int, *, padded: bool = False) -> Inputs:
    """Return token ids and labels; padded, every second row ends earlier, by 1/8 of the length and more.

    A mask that hides nothing would not do: transformers drops it in an eager call, and keeps it in a captured graph.
    """
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    ends = torch.tensor([length if row % 2 else length - length // 8 - row % (length // 4) for row in range(batch)])
    mask = (torch.arange(length) < ends[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _images(batch: int, side: int, classes: int = 1000) -> Inputs:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, side, side, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (batch,), generator=random)}


def _bert(width: int, layers: int, heads: int, vocabulary: int = 30522) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = transformers.BertConfig(**sizes, intermediate_size=4 * width, vocab_size=vocabulary)
    return transformers.BertForMaskedLM(config)


def _gpt2(width: int, layers: int, heads: int, **options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": heads, **options}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))


def _vit(width: int, layers: int, heads: int) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, intermediate_size=4 * width, num_labels=1000)
    )


def _llama(layers: int = 22, width: int = 2048, heads: int = 32, vocabulary: int = 32000) -> nn.Module:
    """The sizes of TinyLlama, of 1.1 billion parameters with 22 layers."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 11 * width // 4}
    numbers: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": 4, "vocab_size": vocabulary}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **numbers, use_cache=False))


def _t5(width: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = 32128) -> nn.Module:
    sizes: dict[str, Any] = {"d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads}
    special: dict[str, Any] = {"pad_token_id": 0, "decoder_start_token_id": 0, "vocab_size": vocabulary}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special, use_cache=False))


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
    def images() -> Inputs:
        found = inputs()
        return {**found, "pixel_values": found["pixel_values"].contiguous(memory_format=torch.channels_last)}

    return FullModel(lambda: build().to(memory_format=torch.channels_last), images)  # type: ignore[call-overload]


def _bert_of(batch: int, length: int, *sizes: int, padded: bool = False) -> FullModel:
    return FullModel(lambda: _bert(*sizes), lambda: _tokens(batch, length, 30522, padded=padded))


def _gpt2_of(batch: int, *sizes: int, **options: Any) -> FullModel:
    return FullModel(lambda: _gpt2(*sizes, **options), lambda: _tokens(batch, 1024, 50257))


MODELS: dict[str, FullModel] = {
    **SMALL,
    "BERT-large b32 s512": _bert_of(32, 512, 1024, 24, 16),
    "BERT-large b32 s512, padded": _bert_of(32, 512, 1024, 24, 16, padded=True),
    # Sizes of vocabularies that products take best, beside the usual ones.
    "BERT-large b32 s512, vocabulary 30528": _bert_of(32, 512, 1024, 24, 16, 30528),
    "GPT-2 medium b8 s1024, fused GELU, vocabulary 50304": _gpt2_of(
        *(8, 1024, 24, 16), activation_function="gelu_pytorch_tanh", vocab_size=50304
    ),
    "BERT-base b32 s512": _bert_of(32, 512, 768, 12, 12),
    "BERT-base b8 s512": _bert_of(8, 512, 768, 12, 12),
    "GPT-2 medium b8 s1024": _gpt2_of(8, 1024, 24, 16),
    "GPT-2 medium b8 s1024, fused GELU": _gpt2_of(8, 1024, 24, 16, activation_function="gelu_pytorch_tanh"),
    "GPT-2 b8 s1024": _gpt2_of(8, 768, 12, 12),
    "GPT-2 b4 s1024": _gpt2_of(4, 768, 12, 12),
    "Llama 1.1B b2 s2048": FullModel(_llama, lambda: _tokens(2, 2048, 32000)),
    "Llama 4x2048": FullModel(lambda: _llama(4), lambda: _tokens(2, 512, 32000)),
    "ResNet-50 b256": _channels_last(ResNet50, lambda: _images(256, 224)),
    "ResNet-50 b32": _channels_last(ResNet50, lambda: _images(32, 224)),
    "ViT-L b64": FullModel(lambda: _vit(1024, 24, 16), lambda: _images(64, 224)),
    "T5-base b16 s512, padded": FullModel(_t5, lambda: _tokens(16, 512, 32128, padded=True)),
    "BERT tiny": FullModel(lambda: _bert(16, 1, 2, 32), lambda: _tokens(2, 8, 32, padded=True)),
    "T5 tiny": FullModel(lambda: _t5(16, 1, 2, 32), lambda: _tokens(2, 8, 32, padded=True)),
    "ResNet tiny": _channels_last(lambda: ResNet((1,), width=8, classes=4), lambda: _images(2, 16, 4)),
    "Llama tiny": FullModel(lambda: _llama(1, 32, 4, 32), lambda: _tokens(2, 8, 32)),
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
