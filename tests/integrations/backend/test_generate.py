"""``generate`` of enabled models of transformers: the tokens of torch.autocast, few graphs, caches of real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import autocastfx
from tests.helpers import sampled
from tests.nearness import assert_as_near_as_autocast

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
GPT: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
T5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128},
    **{"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1},
    **{"forced_eos_token_id": None},
}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**HEADS)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT, bos_token_id=1, eos_token_id=None)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**HEADS, head_dim=8)),
    "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**HEADS, num_local_experts=4)),
    "Mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**HEADS, sliding_window=16)),
    "GPT-NeoX": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    ),
    "BART": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
}
NEW = 64
# For the prompt, for the second token, and for all lengths. T5 and BART have an encoder besides, and a window of 16
# tokens makes graphs until it is full.
GRAPHS = {"T5": 4, "BART": 4, "Mistral": 6}


def tensors(cache: Any) -> list[Tensor]:
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]
    return [held for part in parts or [cache] for layer in part.layers for held in (layer.keys, layer.values)]


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("name", sampled(MODELS, lambda _, name: name in ("Llama", "T5")))
def test_tokens_graphs_and_cache(name: str, is_sampled: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(3, 64, (2, 8))
    options = {"max_new_tokens": NEW, "do_sample": is_sampled, "return_dict_in_generate": True, "use_cache": True}
    torch.manual_seed(1)
    with torch.autocast("cpu", LOW):
        wanted = model.generate(ids, **options)
    autocastfx.enable(model, dtype=LOW)
    torch.manual_seed(1)
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert len(backend.graphs) <= GRAPHS.get(name, 3)
    assert all(graph.plan is not None for graph in backend.graphs)
    assert backend.skipped == []
    assert all(type(held) is Tensor for held in tensors(found.past_key_values))


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_an_encoder_that_is_called_by_itself_is_converted(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(3, 64, (2, 8))

    def encoded(model: Any) -> dict[str, Tensor]:
        return {"hidden state": model.get_encoder()(ids).last_hidden_state.detach()}

    enabled = autocastfx.enable(copy.deepcopy(model), dtype=LOW)
    assert_as_near_as_autocast(encoded, model, enabled, LOW, times=2)
    autocastfx.disable(enabled)
    assert torch.equal(*encoded(enabled).values(), *encoded(model).values())
