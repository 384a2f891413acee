"""Tasks of the losses benchmark: common model families, so small that 200 steps take seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.families import STILL_GPT2, FullModel, ResNet, gpt2, llama
from benchmarks.models.tasks import ALPHABET, CharacterGPT, DigitsCNN, Task

STEPS, CONTEXT = 200, 64


@dataclass(frozen=True)
class Followed(ABC):
    """A model that returns its loss and its logits, with its training data.

    Attributes:
        task: gives the batches and learning rates; its own model is not used.
        make: builds the model; its weights come from the global seed.
    """

    task: Task
    make: Callable[[], nn.Module]

    def model(self, seed: int) -> FullModel:
        """Return the model with the weights of a seed, and the seed's first batch."""

        def build() -> nn.Module:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                return self.make()

        return FullModel(build, lambda: next(self.batches(seed)))

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        """Yield the keyword arguments of the call of each step."""
        return (self.arguments(inputs, labels) for inputs, labels in self.task.batches(seed))

    @abstractmethod
    def arguments(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Turn a batch of ``task`` into the keyword arguments of a call."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross entropy in nats, in float32, of logits and the ``labels`` of a call."""


class Images(Followed):
    """scikit-learn's digits, enlarged to 32 x 32 and in three equal channels."""

    def arguments(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        pixels = F.interpolate(inputs, scale_factor=4.0, mode="bilinear").expand(-1, 3, -1, -1)
        return {"pixel_values": pixels.contiguous(), "labels": labels}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)


class Text(Followed):
    """The next character of the source of Python's standard library."""

    def arguments(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        ids = torch.cat([inputs, labels[:, -1:]], 1)  # the models shift labels themselves
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


_VOCABULARY = len(ALPHABET) + 1


def _text(make: Callable[[], nn.Module]) -> Text:
    return Text(CharacterGPT(steps=STEPS, batch=8, rate=1e-3, context=CONTEXT, validation=0), make)


_EAGER = {"attn_implementation": "eager"}
_SIZES = {"n_positions": CONTEXT + 1, "bos_token_id": 0, "eos_token_id": 0}

# Without dropout.
FOLLOWED: dict[str, Followed] = {
    "ResNet-10": Images(DigitsCNN(steps=STEPS, batch=32, rate=5e-4), lambda: ResNet((1, 1, 1, 1), 16, classes=10)),
    "GPT-2 2x64": _text(partial(gpt2, 64, 2, 4, _VOCABULARY, **_SIZES, **STILL_GPT2, **_EAGER)),
    "Llama 2x64": _text(partial(llama, 64, 2, 4, 172, _VOCABULARY, **_EAGER)),
}
