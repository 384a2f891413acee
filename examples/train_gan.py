"""Train a small GAN on scikit-learn's digits in 16 bits: two optimizers, each with a loss scale of its own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import autocastfx

BATCH_SIZE = 64
NOISE = 32
STEPS = 800
MAX_DISTANCE = 0.15  # between the mean images of real and generated digits, in grey levels from 0 to 1


@dataclass(frozen=True)
class Result:
    """What came out: how far generated digits are from real ones, and how often each optimizer skipped a step.

    ``spread`` is the mean standard deviation of a generated pixel over that of a real one: 0 would be one same image.
    """

    dtype: torch.dtype
    distance: float
    spread: float
    skipped: dict[str, int]
    scales: dict[str, float]

    @property
    def passed(self) -> bool:
        return self.distance <= MAX_DISTANCE and 0.5 <= self.spread <= 1.5


def load(device: str = "cpu") -> torch.Tensor:
    """The 1,797 images as vectors of 64 pixels from -1 to 1."""
    images, _ = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32, device=device) / 8 - 1


def generator() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()),
        *(nn.Linear(128, 64), nn.Tanh()),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 128), nn.LeakyReLU(0.2)),
        *(nn.Dropout(0.3), nn.Linear(128, 1)),
    )


def optimizer_of(model: nn.Module, dtype: torch.dtype) -> autocastfx.LossScalingOptimizer:
    """An optimizer with its own loss scale: the two losses differ, and so does what their gradients can bear."""
    scale = autocastfx.DynamicLossScale(interval=200) if dtype == torch.float16 else autocastfx.NoLossScale()
    return autocastfx.LossScalingOptimizer(torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.5, 0.99)), scale)


def run(
    dtype: torch.dtype = torch.bfloat16,
    steps: int = STEPS,
    seed: int = 0,
    weights: str = "cast",
    device: str = "cpu",
) -> Result:
    """Train both networks, and compare what is generated with what is real."""
    torch.manual_seed(seed)
    real_images = load(device)
    noise = torch.randn(BATCH_SIZE, NOISE, device=device)
    g = autocastfx.convert(generator().to(device), (noise,), dtype=dtype, weights=weights)
    d = autocastfx.convert(discriminator().to(device), (real_images[:BATCH_SIZE],), dtype=dtype, weights=weights)
    optimizers = {"generator": optimizer_of(g, dtype), "discriminator": optimizer_of(d, dtype)}
    skipped = dict.fromkeys(optimizers, 0)
    for _ in tqdm(range(steps), desc=_name(dtype), unit="step", leave=False, disable=None):
        real = real_images[torch.randint(len(real_images), (BATCH_SIZE,), device=device)]
        fake = g(torch.randn(BATCH_SIZE, NOISE, device=device))

        optimizer = optimizers["discriminator"]
        optimizer.zero_grad()
        optimizer.backward(F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean())
        optimizer.step()

        d.requires_grad_(False)  # the generator's loss goes through it, and gives it no gradients
        optimizer = optimizers["generator"]
        optimizer.zero_grad()
        optimizer.backward(F.softplus(-d(fake)).mean())
        optimizer.step()
        d.requires_grad_(True)

        for name in optimizers:
            skipped[name] += optimizers[name].last_step.skipped
    with torch.no_grad():
        made = g.eval()(torch.randn(len(real_images), NOISE, device=device))
    return Result(
        dtype=dtype,
        distance=float((made.mean(0) - real_images.mean(0)).abs().mean() / 2),
        spread=float(made.std(0).mean() / real_images.std(0).mean()),
        skipped=skipped,
        scales={name: optimizer.loss_scaler.value for name, optimizer in optimizers.items()},
    )


def report(result: Result, steps: int = STEPS) -> bool:
    """Print the result; whether generated digits are near real ones."""
    print(
        f"GAN on scikit-learn's digits, {_name(result.dtype)}, {steps} steps: {'passed' if result.passed else 'FAILED'}"
    )
    print(f"  distance of the mean images  {result.distance:.3f} grey levels (at most {MAX_DISTANCE} is asked for)")
    print(f"  spread beside real digits    {result.spread:.2f} (0.5 to 1.5)")
    for name, skipped in result.skipped.items():
        print(f"  {name:<14}skipped {skipped} steps, loss scale at the end {result.scales[name]:g}")
    return result.passed


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--weights", choices=("cast", "cached"), default="cast", help="of convert; default: cast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    result = run(getattr(torch, options.dtype), options.steps, options.seed, options.weights, options.device)
    return 0 if report(result, options.steps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
