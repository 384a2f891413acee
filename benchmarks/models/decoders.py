"""Small decoders of transformers, one of each family, as a trainer calls them: without a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

IDS = torch.arange(16).reshape(2, 8)
WINDOW = 16

_SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"vocab_size": 32, "max_position_embeddings": 4096, "use_cache": False, "attn_implementation": "sdpa"},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {
    **{"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 4096, "use_cache": False},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
}
_OPT: dict[str, Any] = {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}
_OPT.pop("intermediate_size")


def _made(kind: Any, config: Any, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return kind(config(**sizes)).eval()


_t: Any = transformers
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": partial(_made, _t.GPT2LMHeadModel, _t.GPT2Config, _GPT),
    "opt": partial(_made, _t.OPTForCausalLM, _t.OPTConfig, _OPT),
    "gpt_neox": partial(_made, _t.GPTNeoXForCausalLM, _t.GPTNeoXConfig, _SIZES),
    "llama": partial(_made, _t.LlamaForCausalLM, _t.LlamaConfig, _GROUPED),
    "mistral": partial(_made, _t.MistralForCausalLM, _t.MistralConfig, {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": partial(_made, _t.Qwen2ForCausalLM, _t.Qwen2Config, _GROUPED),
    "qwen3": partial(_made, _t.Qwen3ForCausalLM, _t.Qwen3Config, {**_GROUPED, "head_dim": 4}),
    "gemma": partial(_made, _t.GemmaForCausalLM, _t.GemmaConfig, {**_GROUPED, "head_dim": 4}),
    "gemma3": partial(
        _made, _t.Gemma3ForCausalLM, _t.Gemma3TextConfig, {**_GROUPED, "head_dim": 4, "sliding_window": WINDOW}
    ),
    "phi3": partial(_made, _t.Phi3ForCausalLM, _t.Phi3Config, {**_GROUPED, "sliding_window": WINDOW}),
    "starcoder2": partial(_made, _t.Starcoder2ForCausalLM, _t.Starcoder2Config, _GROUPED),
    "olmo2": partial(_made, _t.Olmo2ForCausalLM, _t.Olmo2Config, _GROUPED),
    "cohere": partial(_made, _t.CohereForCausalLM, _t.CohereConfig, _GROUPED),
}
