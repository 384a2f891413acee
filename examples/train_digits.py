"""Train a CNN or a small ViT on scikit-learn's digits in float32 and, from the same weights and batches, in 16 bits."""

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
from torch.nn import functional as F
from tqdm import tqdm

import autocastfx

MAX_DIFFERENCE = 0.5  # percentage points of mean test accuracy
BATCH_SIZE = 64
SEEDS = (0, 1, 2)
EPOCHS = {"cnn": 12, "vit": 30}


class DigitsNet(nn.Sequential):
    """A CNN: logits of the ten digits from 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class DigitsViT(nn.Module):
    """A vision transformer: logits of the ten digits from the 16 patches, of 2 x 2 pixels, of 8 x 8 images."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.head(self.norm(self.blocks(self.patches(patches) + self.positions)).mean(1))


MODELS = {"cnn": DigitsNet, "vit": DigitsViT}


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


def load(device: str = "cpu") -> Digits:
    """The 1,797 images, three tenths of them for testing; the same split each time."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    split = train_test_split(images, torch.tensor(labels), test_size=0.3, stratify=labels, random_state=0)
    return Digits(*(part.to(device) for part in split))


def loss_scale_for(dtype: torch.dtype) -> autocastfx.DynamicLossScale | autocastfx.NoLossScale:
    """float16 loses small gradients unless the loss is scaled; bfloat16 and float32 have the range for them."""
    return autocastfx.DynamicLossScale() if dtype == torch.float16 else autocastfx.NoLossScale()


def train(
    model: nn.Module, digits: Digits, seed: int, epochs: int, label: str, dtype: torch.dtype = torch.float32
) -> float:
    """Train ``model``, whose gradients may have ``dtype`` inside, and return its test accuracy in percent."""
    torch.manual_seed(seed)  # order of the batches, dropout
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = autocastfx.LossScalingOptimizer(adamw, loss_scale_for(dtype))
    steps = epochs * -(-len(digits.train_images) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 1))
    model.train()
    for _ in tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None):
        for batch in torch.randperm(len(digits.train_images)).split(BATCH_SIZE):
            loss = F.cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.step_scheduler(schedule)
    return accuracy(model, digits)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Percentage of the test images that ``model`` recognises."""
    right = model.eval()(digits.test_images).argmax(1) == digits.test_labels
    return 100 * float(right.double().mean())


def run(
    dtype: torch.dtype = torch.bfloat16,
    seeds: Sequence[int] = SEEDS,
    epochs: int | None = None,
    model: str = "cnn",
    weights: str = "cast",
    device: str = "cpu",
) -> list[Result]:
    """Train both ways for each seed."""
    digits = load(device)
    epochs = EPOCHS[model] if epochs is None else epochs
    results: list[Result] = []
    for seed in seeds:
        torch.manual_seed(seed)
        original = MODELS[model]().to(device)
        # The converted model shares the parameters of the one it came from, so each is trained on a copy of its own.
        example = digits.train_images[:BATCH_SIZE]
        amp_model = autocastfx.convert(copy.deepcopy(original), (example,), dtype=dtype, weights=weights)
        float32 = train(original, digits, seed, epochs, f"seed {seed}, float32")
        low = train(amp_model, digits, seed, epochs, f"seed {seed}, {_name(dtype)}", dtype)
        results.append(Result(seed, float32, low, amp_model))
    return results


def report(results: Sequence[Result], epochs: int = EPOCHS["cnn"], model: str = "cnn") -> bool:
    """Print the accuracies; whether their means are near enough."""
    low = _name(getattr(torch, results[0].amp_model.plan.low))
    print(f"{model} on scikit-learn's digits, {epochs} epochs; test accuracy in percent")
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
    parser.add_argument("--model", choices=sorted(MODELS), default="cnn", help="default: cnn")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="default: bfloat16; float16 convolutions are very slow on a CPU",
    )
    parser.add_argument("--weights", choices=("cast", "cached"), default="cast", help="of convert; default: cast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--epochs", type=int, help=f"default: {EPOCHS['cnn']} (cnn), {EPOCHS['vit']} (vit)")
    options = parser.parse_args()
    epochs = EPOCHS[options.model] if options.epochs is None else options.epochs
    dtype = getattr(torch, options.dtype)
    results = run(dtype, options.seeds, epochs, options.model, options.weights, options.device)
    return 0 if report(results, epochs, options.model) else 1


if __name__ == "__main__":
    raise SystemExit(main())
