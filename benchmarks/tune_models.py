"""Models of the tune benchmark, each with real batches: characters of Python's library, scikit-learn's digits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from autocastfx.numerics.sensitivity import loss_of
from benchmarks.accuracy_tasks import ALPHABET, CharacterGPT, DigitsCNN, DigitsViT, Task
from benchmarks.losses_tasks import FOLLOWED
from benchmarks.models import ResNet

__all__ = ["MODELS", "Case", "trained"]

WARM_UP, CONTEXT, BATCH = 40, 64, 8


@dataclass(frozen=True)
class Case:
    """A model to tune.

    Attributes:
        build: makes it; its weights come from the global seed.
        batches: of a seed, without end for practical purposes.
        loss: of an output and a batch.
        inputs: what of a batch the model takes.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss: Callable[[Any, Any], Tensor] | None = None
    inputs: Callable[[Any], Any] | None = None

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Call the model on a batch."""
        given = batch if self.inputs is None else self.inputs(batch)
        return model(**given) if isinstance(given, dict) else model(given)


def trained(case: Case, steps: int = WARM_UP) -> nn.Module:
    """Build the model and train it in float32 for some steps, so that its gradients are those of training."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = case.build().train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for batch in itertools.islice(case.batches(0), steps):
            optimizer.zero_grad()
            loss_of(case.call(model, batch), batch, case.loss).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model


def _of_task(task: Task) -> Case:
    return Case(task.build, task.batches, lambda out, batch: task.loss(out, batch[1]), lambda batch: batch[0])


def _followed(name: str) -> Case:
    case = FOLLOWED[name]
    return Case(case.make, case.batches)


_TEXT = CharacterGPT(steps=10_000, batch=BATCH, rate=1e-3, context=CONTEXT, validation=0)


def _text(seed: int) -> Iterator[dict[str, Tensor]]:
    return ({"input_ids": inputs, "labels": labels.contiguous()} for inputs, labels in _TEXT.batches(seed))


def _masked(seed: int) -> Iterator[dict[str, Tensor]]:
    """Every sixth token hidden, to be found again."""
    generator = torch.Generator().manual_seed(seed)
    for inputs, _ in _TEXT.batches(seed):
        hidden = torch.rand(inputs.shape, generator=generator) < 1 / 6
        ids = torch.where(hidden, len(ALPHABET), inputs)
        yield {"input_ids": ids, "labels": torch.where(hidden, inputs, -100)}


_SIZES: dict[str, Any] = {"vocab_size": len(ALPHABET) + 1}


def _bert() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **off, **_SIZES))  # type: ignore[arg-type]


def _t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0, "use_cache": False}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special, **_SIZES))  # type: ignore[arg-type]


class _Tagger(nn.Module):
    """Two bidirectional LSTM layers and the next character for each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(len(ALPHABET) + 1, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET) + 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.layers(self.table(input_ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _resnet18() -> nn.Module:
    return ResNet((2, 2, 2, 2), 16, classes=10)


MODELS: dict[str, Case] = {
    "char GPT": _of_task(CharacterGPT(steps=10_000, batch=BATCH, rate=1e-3, context=CONTEXT, validation=0)),
    "digits ViT": _of_task(DigitsViT(steps=10_000, batch=32, rate=1e-3)),
    "digits CNN": _of_task(DigitsCNN(steps=10_000, batch=32, rate=1e-3)),
    "BERT 2x64": Case(_bert, _masked),
    "GPT-2 2x64": _followed("GPT-2 2x64"),
    "Llama 2x64": _followed("Llama 2x64"),
    "T5 2+2x64": Case(_t5, _text),
    "LSTM 2x64": Case(_Tagger, _text),
    "ResNet-18": Case(_resnet18, FOLLOWED["ResNet-10"].batches),
}
