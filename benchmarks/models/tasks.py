"""Tasks of the accuracy benchmark: small models on data that every installation has."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CNN(nn.Sequential):
    """Logits of the ten digits from 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


class ViT(nn.Module):
    """Logits of the ten digits from 8 x 8 images in patches of 2 x 2."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.flatten(1).unflatten(1, (4, 2, 4, 2)).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.head(self.norm(self.blocks(self.patches(patches) + self.positions)).mean(1))


class GPT(nn.Module):
    """Logits of the next character."""

    def __init__(self, vocabulary: int, context: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


@dataclass(frozen=True)
class Task(ABC):
    """A model with its data and hyper-parameters, the same for all modes.

    The learning rate rises for a tenth of the steps and falls to 0 along a cosine, so that the runs converge.
    """

    measure: ClassVar[str]  # what ``score`` gives
    tolerance: ClassVar[float]  # how far the mean over the seeds may be from float32's, in the unit of ``score``
    seeds: ClassVar[int]
    steps: int
    batch: int
    rate: float

    @abstractmethod
    def build(self) -> nn.Module:
        """Build a model; its weights come from the global seed."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield inputs and labels for each step."""

    @abstractmethod
    def score(self, model: Any) -> float:
        """Score ``model``, in evaluation mode, on data that it was not trained on."""

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer of the parameters."""
        return torch.optim.AdamW(parameters, lr=self.rate, fused=True)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss to minimize."""
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = max(self.steps // 10, 1)
        if step < warmup:
            return self.rate * (step + 1) / warmup
        return self.rate * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup))) / 2

    @property
    def protocol(self) -> str:
        """Return the settings under which results are comparable."""
        return ", ".join(f"{name} {value:g}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Digits(Task):
    """Test accuracy on scikit-learn's digits: half of the 1,797 images are trained on, the other half tested."""

    measure = "accuracy %"
    tolerance = 0.5
    seeds = 5

    def batches(self, seed: int) -> Iterator[Batch]:
        images, labels, _, _ = digits()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.steps):
            chosen = torch.randint(len(images), (self.batch,), generator=generator)
            yield images[chosen], labels[chosen]

    def score(self, model: Any) -> float:
        _, _, images, labels = digits()
        return 100 * float((model(images).argmax(-1) == labels).double().mean())


class DigitsCNN(Digits):
    """Convolutions and batch norms."""

    def build(self) -> nn.Module:
        return CNN()


class DigitsViT(Digits):
    """Attention and layer norms."""

    def build(self) -> nn.Module:
        return ViT()


@dataclass(frozen=True)
class Underflow(Digits):
    """A perceptron with a loss so small that its gradients underflow in float16.

    The gradients by logits are below half of float16's smallest number. Plain SGD with an equally larger learning rate
    makes training in float32 the same as without the factor.
    """

    factor: float = 2.0**-20  # a gradient by a logit is at most factor / batch

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.rate, fused=True)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) * self.factor

    def rate_at(self, step: int) -> float:
        return super().rate_at(step) / self.factor


@dataclass(frozen=True)
class CharacterGPT(Task):
    """Validation loss on the source of Python's standard library, by character; every tenth file is for validation."""

    context: int
    validation: int  # characters

    measure = "loss, nats"
    tolerance = 0.01
    seeds = 3

    def build(self) -> nn.Module:
        return GPT(len(ALPHABET) + 1, self.context)

    def batches(self, seed: int) -> Iterator[Batch]:
        text, _ = source()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.steps):
            starts = torch.randint(len(text) - self.context, (self.batch, 1), generator=generator)
            rows = text[starts + torch.arange(self.context + 1)]
            yield rows[:, :-1], rows[:, 1:]

    def score(self, model: Any) -> float:
        _, text = source()
        count = self.validation // self.context
        starts = torch.linspace(0, len(text) - self.context - 1, count).long()  # spread over all the files
        rows = text[starts[:, None] + torch.arange(self.context + 1)]
        losses = [
            F.cross_entropy(model(part[:, :-1]).float().flatten(0, 1), part[:, 1:].flatten(), reduction="none").double()
            for part in rows.split(256)
        ]
        return float(torch.cat(losses).mean())


ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


@cache
def source() -> tuple[Tensor, Tensor]:
    """Return the standard library's source for training and for validation, as indices into ALPHABET."""
    import os

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    place = {character: index for index, character in enumerate(ALPHABET)}
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    held = [torch.tensor([place.get(character, len(ALPHABET)) for character in text]) for text in texts]
    return torch.cat([t for i, t in enumerate(held) if i % 10]), torch.cat(held[::10])


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images in [0, 1] and labels for training, then for testing; the split is fixed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    held = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train_images, test_images, train_labels, test_labels = train_test_split(
        *held, test_size=0.5, stratify=labels, random_state=0
    )
    return train_images, train_labels, test_images, test_labels


TASKS: dict[str, Task] = {
    "digits CNN": DigitsCNN(steps=250, batch=32, rate=3e-3),
    "digits ViT": DigitsViT(steps=300, batch=32, rate=2e-3),
    "character GPT": CharacterGPT(steps=500, batch=8, rate=3e-3, context=64, validation=2**17),
    "underflow": Underflow(steps=400, batch=64, rate=0.3),
}
