"""Train a small CNN on scikit-learn's digits in float32 and, from the same weights and batches, in 16 bits."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from tqdm import tqdm

import autocastfx

MAX_DIFFERENCE = 0.5  # percentage points of mean test accuracy
BATCH_SIZE = 64
SEEDS = (0, 1, 2)
EPOCHS = 12


class DigitsNet(nn.Sequential):
    """Logits of the ten digits from 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1] and labels, for training and for testing."""

    train_images: torch.Tensor
    test_images: torch.Tensor
    train_labels: torch.Tensor
    test_labels: torch.Tensor


@dataclass(frozen=True)
class Result:
    """Test accuracies of one seed, in percent."""

    seed: int
    float32: float
    low: float
    amp_model: autocastfx.AmpModule


def load() -> Digits:
    """The 1,797 images, three tenths of them for testing; the same split each time."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return Digits(*train_test_split(images, torch.tensor(labels), test_size=0.3, stratify=labels, random_state=0))


def train(model: nn.Module, digits: Digits, seed: int, epochs: int, label: str) -> float:
    """Train ``model`` and return its test accuracy in percent."""
    torch.manual_seed(seed)  # order of the batches, dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = epochs * -(-len(digits.train_images) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None):
        for batch in torch.randperm(len(digits.train_images)).split(BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.inference_mode():
        right = model(digits.test_images).argmax(1) == digits.test_labels
    return 100 * float(right.double().mean())


def run(dtype: torch.dtype = torch.bfloat16, seeds: Sequence[int] = SEEDS, epochs: int = EPOCHS) -> list[Result]:
    """Train both ways for each seed."""
    digits = load()
    results: list[Result] = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = DigitsNet()
        # The converted model shares the parameters of the one it came from, so each is trained on a copy of its own.
        amp_model = autocastfx.convert(copy.deepcopy(model), (digits.train_images[:BATCH_SIZE],), dtype=dtype)
        float32 = train(model, digits, seed, epochs, f"seed {seed}, float32")
        low = train(amp_model, digits, seed, epochs, f"seed {seed}, {_name(dtype)}")
        results.append(Result(seed, float32, low, amp_model))
    return results


def report(results: Sequence[Result], epochs: int = EPOCHS) -> bool:
    """Print the accuracies; whether their means are near enough."""
    low = _name(getattr(torch, results[0].amp_model.plan.low))
    print(f"CNN on scikit-learn's digits, {epochs} epochs; test accuracy in percent")
    print(f"  {'seed':<6}{'float32':>9}{low:>10}")
    for result in results:
        print(f"  {result.seed:<6}{result.float32:>9.2f}{result.low:>10.2f}")
    float32, other = mean(r.float32 for r in results), mean(r.low for r in results)
    passed = abs(other - float32) <= MAX_DIFFERENCE
    print(f"  {'mean':<6}{float32:>9.2f}{other:>10.2f}")
    print(
        f"  {'passed' if passed else 'FAILED'}: the means differ by {other - float32:+.2f} percentage points "
        f"(at most {MAX_DIFFERENCE} is asked for)"
    )
    return passed


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="default: bfloat16; float16 convolutions are very slow on a CPU, and this script scales no loss",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default: {EPOCHS}")
    options = parser.parse_args()
    results = run(getattr(torch, options.dtype), options.seeds, options.epochs)
    return 0 if report(results, options.epochs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
