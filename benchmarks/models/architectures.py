"""Small models of as many architectures of transformers as one rule makes: few layers, few heads, little width."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto

from benchmarks.models.zoo import ZooModel, generator

_LARGEST = 3_000_000  # parameters: what the rule cannot make small is left out
# The names that configurations give to sizes, and the values that they get here.
_SIZES: dict[int, tuple[str, ...]] = {
    2: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
        *("num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "num_experts_per_tok", "type_vocab_size"),
        *("expand",),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
        *("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "num_labels",
    ),
    8: (
        *("head_dim", "d_kv", "attention_head_size", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("state_size", "patch_size"),
    ),
    16: ("q_lora_rank", "kv_lora_rank", "sliding_window"),
    32: (
        *("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embed_dim", "word_embed_proj_dim"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"),
    ),
    64: (
        *("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "intermediate_size", "n_inner", "d_ff", "hidden_dim"),
        *("ffn_hidden_size", "vocab_size", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
        "max_seq_length",
    ),
    1: ("n_group", "topk_group", "bos_token_id", "cls_token_id", "decoder_start_token_id"),
    0: ("pad_token_id",),
}
_VALUES: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names},
    **{"eos_token_id": 2, "sep_token_id": 2, "unk_token_id": 3, "mask_token_id": 4, "use_cache": False},
}
_KINDS: dict[str, Any] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}


def small_models() -> Iterator[ZooModel]:
    """One model of each architecture that has a head of one of these kinds, in the order of transformers' tables."""
    seen: set[str] = set()
    for kind, table in _KINDS.items():
        for config in table:
            if config.model_type not in seen:
                seen.add(config.model_type)
                yield ZooModel(config.model_type, partial(_made, kind, config), partial(_inputs, kind))


def _made(kind: str, config: Any) -> nn.Module:
    """Make the model; raises whatever transformers raises where the rule does not fit."""
    found = _KINDS[kind][config]
    model_class: Any = found[0] if isinstance(found, (tuple, list)) else found
    given = _small(config)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(given).parameters())
    if count > _LARGEST:
        raise ValueError(f"{count / 1e6:.1f} million parameters")
    torch.manual_seed(0)
    return model_class(_small(config))


def _small(config: Any, depth: int = 0) -> Any:
    names: set[str] = set()
    for base in config.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
        if "__init__" in base.__dict__:
            names |= set(inspect.signature(base.__init__).parameters)
    values = {name: _VALUES[name] for name in names & _VALUES.keys()}
    parts = getattr(config, "sub_configs", None) or {}
    if depth < 2:
        values |= {name: _small(part, depth + 1).to_dict() for name, part in parts.items() if _is_config(part)}
    made = config(**values)
    for name, value in list(vars(made).items()):  # the same numbers in each run, whatever draws them
        if "drop" in name and isinstance(value, float):
            setattr(made, name, 0.0)
    return made


def _is_config(part: Any) -> bool:
    return part is not transformers.AutoConfig


def _inputs(kind: str, batch: int, size: int) -> dict[str, Any]:
    numbers = generator(batch, size)
    if kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=numbers), "labels": torch.arange(batch) % 4}
    ids = torch.randint(5, 60, (batch, size), generator=numbers)
    return {"input_ids": ids, "labels": ids}
