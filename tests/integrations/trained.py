"""What the tests of trainers train: a GPT on characters and a small BERT, of transformers, with injected overflows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

STEPS, HALF, BATCH, LENGTH = 200, 100, 8, 16
OVERFLOWS = (30, 150)  # one before the checkpoint, one after
_t: Any = transformers
_TEXT = Path(__file__).read_text(encoding="utf-8")
_CODES = {character: code for code, character in enumerate(sorted({*_TEXT}))}
_BERT: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 64, "num_labels": 2, "max_position_embeddings": 32},
}


class Characters(Dataset[dict[str, Tensor]]):
    """Pieces of this file, by character."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * 7 % (len(_TEXT) - LENGTH)
        ids = torch.tensor([_CODES[character] for character in _TEXT[start : start + LENGTH]])
        return {"input_ids": ids, "labels": ids}


class Sides(Dataset[dict[str, Tensor]]):
    """Sequences of which half the tokens or more are above the middle, or not."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": (ids[0] >= 32).long()}


def char_gpt() -> nn.Module:
    config = {"vocab_size": len(_CODES), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    return _t.GPT2LMHeadModel(
        _t.GPT2Config(**config, bos_token_id=0, eos_token_id=None, loss_type="ForCausalLM", use_cache=False)
    )


def small_bert() -> nn.Module:
    return _t.BertForSequenceClassification(_t.BertConfig(**_BERT))


TASKS: dict[str, tuple[Callable[[], nn.Module], type[Dataset[dict[str, Tensor]]]]] = {
    "char GPT": (char_gpt, Characters),
    "BERT": (small_bert, Sides),
}
CASES = [(low, task) for low in (torch.bfloat16, torch.float16) for task in TASKS]


def made(task: str) -> tuple[nn.Module, Dataset[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model, data = TASKS[task]
    return model().train(), data()


def let_overflow(model: nn.Module, done: int = 0) -> None:
    """Make a gradient Inf at the steps ``OVERFLOWS``, of which ``done`` were made before."""
    calls = [done]

    def change(grad: Tensor) -> Tensor:
        calls[0] += 1
        return grad * float("inf") if calls[0] in OVERFLOWS else grad

    next(model.parameters()).register_hook(change)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))
