"""sentence-transformers: a model of several modules on a dict of tensors, and the package's trainer and loss."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from autocastfx.integrations.accelerate import use_grad_scaler
from benchmarks.packages.case import Case, Given
from benchmarks.packages.tiny_text import SENTENCES, tokenizer


def _model() -> SentenceTransformer:
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        body = Transformer(folder)
    return SentenceTransformer(modules=[body, Pooling(32)], device="cpu").train()


def _features() -> Given:
    found = tokenizer()(list(SENTENCES), padding=True, return_tensors="pt")
    return (dict(found),), {}


def _loss(output: Any, _: Given) -> Tensor:
    return output["sentence_embedding"].square().mean()


def _train(model: nn.Module, low: torch.dtype | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                folder,
                max_steps=3,
                per_device_train_batch_size=4,
                optim="sgd",
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                learning_rate=1e-3,
                max_grad_norm=0.0,
            ),
            train_dataset=Dataset.from_dict({"anchor": SENTENCES[:4] * 3, "positive": SENTENCES[4:] * 3}),
            loss=MultipleNegativesRankingLoss(model),
        )
        if low is torch.float16:
            use_grad_scaler(trainer.accelerator)
        trainer.train()


def _checkpointed() -> nn.Module:
    model = _model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


CASES = (Case("SentenceTransformer", _model, _features, _loss, _checkpointed, _train),)
