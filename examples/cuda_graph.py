"""Train with whole steps in a CUDA graph: casts, loss scale, skipping and optimizer are one launch.

    python examples/cuda_graph.py --dtype float16

Small models gain most: their kernels are shorter than the launches. Without a GPU the same steps run one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import autocastfx

BATCH_SIZE = 64
EPOCHS = 12
WARM_UP = 3  # steps that change weights, one by one before the capture
MIN_ACCURACY = 90.0

Step = Callable[[], None]
Repeated = Callable[[Step, autocastfx.LossScalingOptimizer], Step]


def warm_up(step: Step, optimizer: autocastfx.LossScalingOptimizer) -> None:
    """Skipped steps do not count: the optimizer makes its state in the first one that is not skipped."""
    taken = 0
    while taken < WARM_UP:
        step()
        taken += not optimizer.last_step.skipped


def graphed(step: Step, optimizer: autocastfx.LossScalingOptimizer) -> Step:
    """Warm up, on a stream of its own, capture one step, and return what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up(step, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def one_by_one(step: Step, optimizer: autocastfx.LossScalingOptimizer) -> Step:
    """Warm up as ``graphed`` does, and return ``step`` itself."""
    warm_up(step, optimizer)
    return step


def train(
    dtype: torch.dtype, device: str, weights: str, epochs: int, repeated: Repeated
) -> tuple[float, autocastfx.AmpModule, float]:
    """Train: accuracy in percent, the model, and the last loss scale."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32, device=device) / 16
    targets = torch.tensor(labels, device=device)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)).to(device)
    x, y = inputs[:BATCH_SIZE].clone(), targets[:BATCH_SIZE].clone()  # a graph reads where it was captured
    amp_model = autocastfx.convert(network, (x,), dtype=dtype, weights=weights)
    # A graph bakes in numbers, so what changes is a tensor: the learning rate here, the loss scale by itself.
    rate = torch.tensor(3e-3, device=device)
    adamw = torch.optim.AdamW(amp_model.parameters(), lr=rate, fused=True, capturable=device == "cuda")
    optimizer = autocastfx.LossScalingOptimizer(adamw, autocastfx.DynamicLossScale(init=2.0**24))

    def train_on(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(amp_model(x), y))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    replay = repeated(lambda: train_on(x, y), optimizer)
    generator = torch.Generator().manual_seed(1)
    for epoch in tqdm(range(epochs), unit="epoch", leave=False, disable=None):
        rate.fill_(3e-3 * (1 - epoch / epochs))
        for batch in torch.randperm(1400, generator=generator).to(device).split(BATCH_SIZE):
            if len(batch) == BATCH_SIZE:
                x.copy_(inputs[batch])
                y.copy_(targets[batch])
                replay()
            else:  # the last one is smaller
                train_on(inputs[batch], targets[batch])

    with torch.no_grad():
        accuracy = 100 * float((amp_model.eval()(inputs[1400:]).argmax(1) == targets[1400:]).double().mean())
    return accuracy, amp_model, optimizer.loss_scaler.value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--weights", choices=("cast", "cached"), default="cast", help="of convert; default: cast")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default: {EPOCHS}")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    repeated = graphed if device == "cuda" else one_by_one
    found = train(getattr(torch, options.dtype), device, options.weights, options.epochs, repeated)
    accuracy, _, scale = found
    how = "steps replayed from a CUDA graph" if device == "cuda" else "no GPU here, so steps one by one"
    print(f"{options.dtype}, {how}: {'passed' if accuracy >= MIN_ACCURACY else 'FAILED'}")
    print(f"  test accuracy  {accuracy:.2f} % (at least {MIN_ACCURACY:g} is asked for)")
    print(f"  loss scale     {scale:g}")
    return 0 if accuracy >= MIN_ACCURACY else 1


if __name__ == "__main__":
    raise SystemExit(main())
