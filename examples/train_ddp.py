"""Train on several processes with DistributedDataParallel; all skip a step where one overflows.

    torchrun --nproc-per-node 2 examples/train_ddp.py --dtype float16

On a CPU the processes talk through gloo, on GPUs, one each, through NCCL.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import autocastfx

BATCH_SIZE = 32  # of each process
STEPS = 300
MIN_ACCURACY = 90.0


def run(dtype: torch.dtype, steps: int, weights: str = "cast") -> tuple[float, int, bool]:
    """Train in this process of an initialized group: accuracy in percent, skipped steps, whether all weights agree."""
    rank, count = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if dist.get_backend() == "nccl" else "cpu"
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32, device=device) / 16
    targets = torch.tensor(labels, device=device)
    train, test = torch.arange(0, 1400), torch.arange(1400, len(inputs))

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)).to(device)
    amp_model = autocastfx.convert(network, (inputs[:BATCH_SIZE],), dtype=dtype, weights=weights)
    parallel = DistributedDataParallel(amp_model)  # converted first, then wrapped
    # A high first scale, so that a first step overflows: every process must skip the same ones.
    scale = autocastfx.DynamicLossScale(init=2.0**24) if dtype == torch.float16 else autocastfx.NoLossScale()
    optimizer = autocastfx.LossScalingOptimizer(torch.optim.AdamW(parallel.parameters(), lr=3e-3), scale)

    skipped = 0
    generator = torch.Generator().manual_seed(1 + rank)  # each process sees batches of its own
    for _ in tqdm(range(steps), unit="step", leave=False, disable=None if rank == 0 else True):
        batch = train[rank::count][torch.randint(len(train[rank::count]), (BATCH_SIZE,), generator=generator)]
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(parallel(inputs[batch]), targets[batch]))
        optimizer.step()
        skipped += optimizer.last_step.skipped

    with torch.no_grad():
        accuracy = 100 * float((amp_model.eval()(inputs[test]).argmax(1) == targets[test]).double().mean())
    mine = torch.cat([p.detach().flatten() for p in amp_model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    agrees = torch.tensor(float(torch.equal(mine, first)), device=device)
    dist.all_reduce(agrees, op=dist.ReduceOp.MIN)
    return accuracy, skipped, bool(agrees.item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] + " Start it with torchrun.")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--weights", choices=("cast", "cached"), default="cast", help="of convert; default: cast")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_ddp.py")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    try:
        accuracy, skipped, agrees = run(getattr(torch, options.dtype), options.steps, options.weights)
        passed = agrees and accuracy >= MIN_ACCURACY
        if dist.get_rank() == 0:
            print(f"DDP on {dist.get_world_size()} processes, {options.dtype}: {'passed' if passed else 'FAILED'}")
            print(f"  test accuracy  {accuracy:.2f} % (at least {MIN_ACCURACY:g} is asked for)")
            print(f"  skipped steps  {skipped}, on all processes")
            print(f"  weights        {'the same' if agrees else 'NOT the same'} on all processes, to the bit")
        return 0 if passed else 1
    finally:
        # gloo's threads need the GIL to let go of the last collective; where Python ends before, they abort the process
        # (https://github.com/pytorch/pytorch/issues/190489).
        time.sleep(0.2)
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
