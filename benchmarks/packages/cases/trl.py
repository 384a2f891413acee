"""trl: its trainers for supervised and preference data, on a small language model."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from autocastfx.integrations.accelerate import use_grad_scaler
from benchmarks.packages.case import Case, Given
from benchmarks.packages.tiny_text import SENTENCES, tokenizer

_ARGUMENTS: dict[str, Any] = {
    **{"max_steps": 3, "per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 0.0},
    **{"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False, "fp16": False},
    "gradient_checkpointing": False,
}


def _model() -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    return LlamaForCausalLM(config).train()


def _checkpointed() -> nn.Module:
    model = _model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _tokens() -> Given:
    ids = torch.randint(5, 32, (2, 12))
    return (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _loss(output: Any, _: Given) -> Tensor:
    return output.loss


def _run(trainer: Any, low: torch.dtype | None) -> None:
    if low is torch.float16:
        use_grad_scaler(trainer.accelerator)
    trainer.train()


def _fine_tune(model: nn.Module, low: torch.dtype | None, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Dataset.from_dict({"text": SENTENCES * 2})
        arguments = SFTConfig(folder, max_length=16, dataset_text_field="text", **{**_ARGUMENTS, **options})
        _run(SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer()), low)


def _prefer(model: nn.Module, low: torch.dtype | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Dataset.from_dict(
            {"prompt": ["the cat"] * 12, "chosen": SENTENCES[:4] * 3, "rejected": SENTENCES[4:] * 3}
        )
        # Gradients are small: by a small rate weights of 1 would change by a few units in their last place.
        arguments = DPOConfig(folder, max_length=32, **{**_ARGUMENTS, "learning_rate": 1.0})
        made = DPOTrainer(model, copy.deepcopy(model), args=arguments, train_dataset=data, processing_class=tokenizer())
        _run(made, low)


CASES = (
    Case("SFTTrainer", _model, _tokens, _loss, _checkpointed, _fine_tune),
    Case("SFTTrainer, checkpointed", _model, None, train=lambda m, d: _fine_tune(m, d, gradient_checkpointing=True)),
    Case("DPOTrainer", _model, None, train=_prefer),
)
