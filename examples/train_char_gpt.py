"""Train a small character GPT on the source of Python's standard library, in float32 and in 16 bits."""

from __future__ import annotations

import argparse
import copy
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import autocastfx

MAX_DIFFERENCE = 0.05  # nats of validation loss
CONTEXT = 64
BATCH_SIZE = 32
STEPS = 1000
WARM_UP = 50
MODULES = "argparse ast calendar copy datetime functools heapq inspect pathlib pickle random shutil statistics typing"


class Block(nn.Module):
    """Causal attention and an MLP, each after a layer norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """Logits of each next character. The embedding's weight is the head's too."""

    def __init__(
        self, vocabulary: int = 128, width: int = 64, heads: int = 4, layers: int = 2, context: int = CONTEXT
    ) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.characters.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.05)
        self.head.weight = self.characters.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Text:
    """Characters as ASCII codes: the first nine tenths of each module for training, the rest for validation."""

    train: torch.Tensor
    validation: torch.Tensor


@dataclass(frozen=True)
class Result:
    """Validation losses of one seed, in nats a character."""

    seed: int
    float32: float
    low: float
    amp_model: autocastfx.AmpModule


def load(device: str = "cpu") -> Text:
    """The source of some modules of the running Python's standard library, where ? is all that is not ASCII."""
    library, parts = Path(sysconfig.get_path("stdlib")), list[tuple[torch.Tensor, torch.Tensor]]()
    for name in MODULES.split():
        path = library / f"{name}.py"
        source = path if path.exists() else library / name / "__init__.py"
        codes = source.read_text(encoding="utf-8").encode("ascii", "replace")
        whole = torch.frombuffer(bytearray(codes), dtype=torch.uint8).long().to(device)
        parts.append((whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]))
    return Text(torch.cat([first for first, _ in parts]), torch.cat([last for _, last in parts]))


def batch_of(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The characters from each start on, and for each of them the next."""
    windows = text[starts.to(text.device).unsqueeze(1) + torch.arange(CONTEXT + 1, device=text.device)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def loss_scale_for(dtype: torch.dtype) -> autocastfx.DynamicLossScale | autocastfx.NoLossScale:
    """float16 loses small gradients unless the loss is scaled; bfloat16 and float32 have the range for them."""
    return autocastfx.DynamicLossScale() if dtype == torch.float16 else autocastfx.NoLossScale()


def train(model: nn.Module, text: Text, seed: int, steps: int, label: str, dtype: torch.dtype = torch.float32) -> float:
    """Train ``model``, whose gradients may have ``dtype`` inside, and return its validation loss in nats."""
    torch.manual_seed(seed)  # order of the batches
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = autocastfx.LossScalingOptimizer(adamw, loss_scale_for(dtype))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, max(1 - step / max(steps, 1), 0.05))
    )
    model.train()
    progress = tqdm(range(steps), desc=label, unit="step", leave=False, disable=None)
    for _ in progress:
        starts = torch.randint(len(text.train) - CONTEXT, (BATCH_SIZE,))
        loss = loss_of(model, *batch_of(text.train, starts))
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.step_scheduler(schedule)
    return validation_loss(model, text)


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text) -> float:
    """Mean loss on the validation text, in nats a character."""
    model.eval()
    starts = torch.arange(0, len(text.validation) - CONTEXT, CONTEXT)
    batches = [batch_of(text.validation, part) for part in starts.split(256)]
    losses = torch.stack([loss_of(model, *batch).double() for batch in batches])
    sizes = torch.tensor([len(characters) for characters, _ in batches], device=losses.device)
    return float((losses * sizes).sum() / sizes.sum())


def run(
    dtype: torch.dtype = torch.bfloat16,
    seeds: Sequence[int] = (0,),
    steps: int = STEPS,
    weights: str = "cast",
    device: str = "cpu",
) -> list[Result]:
    """Train both ways for each seed."""
    text = load(device)
    results: list[Result] = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = CharGPT().to(device)
        # The converted model shares the parameters of the one it came from, so each is trained on a copy of its own.
        example, _ = batch_of(text.train, torch.arange(BATCH_SIZE))
        amp_model = autocastfx.convert(copy.deepcopy(model), (example,), dtype=dtype, weights=weights)
        float32 = train(model, text, seed, steps, f"seed {seed}, float32")
        low = train(amp_model, text, seed, steps, f"seed {seed}, {_name(dtype)}", dtype)
        results.append(Result(seed, float32, low, amp_model))
    return results


def report(results: Sequence[Result], steps: int = STEPS) -> bool:
    """Print the losses; whether each pair is near enough."""
    low = _name(getattr(torch, results[0].amp_model.plan.low))
    print(f"character GPT on the standard library's source, {steps} steps; validation loss in nats a character")
    print(f"  {'seed':<6}{'float32':>9}{low:>10}")
    for result in results:
        print(f"  {result.seed:<6}{result.float32:>9.4f}{result.low:>10.4f}")
    worst = max((r.low - r.float32 for r in results), key=abs)
    passed = abs(worst) <= MAX_DIFFERENCE
    print(
        f"  {'passed' if passed else 'FAILED'}: they differ by {worst:+.4f} nats at most ({MAX_DIFFERENCE} is allowed)"
    )
    return passed


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--weights", choices=("cast", "cached"), default="cast", help="of convert; default: cast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    results = run(getattr(torch, options.dtype), options.seeds, options.steps, options.weights, options.device)
    return 0 if report(results, options.steps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
