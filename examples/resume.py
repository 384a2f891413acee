"""Stop a training run anywhere, even while it saves, and go on as if it had never stopped.

    python examples/resume.py --folder build/run --steps 60 --kill-at 35   # killed by SIGKILL
    python examples/resume.py --folder build/run --steps 60                # goes on after the last checkpoint

The weights at the end, and everything else that a checkpoint holds, are those of a run without a stop, to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import autocastfx

BATCH_SIZE = 64
NAME = "checkpoint.pt"


def save(state: dict[str, Any], path: Path, before_replace: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint so that at every moment ``path`` is a whole one: the one before, or this one.

    ``before_replace`` is called when the new one is written and has not taken the place of the last one yet.
    """
    content = io.BytesIO()
    torch.save(state, content)
    temporary = path.with_suffix(".tmp")  # in the same folder, so that it can be moved in one step
    with temporary.open("wb") as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())  # the content is on the disk before the name is
    before_replace()
    os.replace(temporary, path)
    if os.name == "posix":  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # and now the name is
        finally:
            os.close(folder)


class Run:
    """A training run whose whole state is a few values: all that the next step depends on."""

    def __init__(self, weights: str = "float32", device: str = "cpu") -> None:
        torch.manual_seed(0)
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32, device=device) / 16
        self.labels = torch.tensor(labels, device=device)
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)).to(device)
        if weights == "float16":  # 16-bit weights made by hand; the optimizer holds their float32 masters
            self.model: nn.Module = network.half()
            self.images = self.images.half()
        else:
            self.model = autocastfx.convert(network, (self.images[:BATCH_SIZE],), dtype=torch.float16)
        self.optimizer = autocastfx.LossScalingOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-2), autocastfx.DynamicLossScale(init=2.0**20, interval=10)
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 20, gamma=0.7)
        self.step_number = 0

    def step(self) -> float:
        """One step on the batch of this step's number; the loss."""
        batch = torch.randint(len(self.images), (BATCH_SIZE,))
        loss = F.cross_entropy(self.model(self.images[batch]).float(), self.labels[batch])
        self.optimizer.zero_grad()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.step_scheduler(self.schedule)
        self.step_number += 1
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's holds the loss scale, its counters, and the masters."""
        return {
            "step": self.step_number,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The model first: the optimizer's masters are more exact than its 16-bit weights."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step_number = state["step"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"]:
            torch.cuda.set_rng_state_all(state["random_cuda"])


def digest(state: Any) -> str:
    """A number for all bits of a state: tensors, numbers and their places."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key, held in part.items():
                found.update(repr(key).encode())
                add(held)
        elif isinstance(part, (list, tuple)):
            for held in part:
                add(held)
        else:
            found.update(repr(part).encode())

    add(state)
    return found.hexdigest()


def run(
    folder: Path,
    steps: int,
    save_every: int = 10,
    kill_at: int | None = None,
    weights: str = "float32",
    device: str = "cpu",
) -> Run:
    """Train up to step ``steps``, from the checkpoint in ``folder`` on if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    path, training = folder / NAME, Run(weights, device)
    if path.exists():
        training.load_state_dict(torch.load(path, map_location=device, weights_only=True))
        print(f"resumed after step {training.step_number}")
    progress = tqdm(total=steps, initial=training.step_number, unit="step", leave=False, disable=None)
    with progress:
        while training.step_number < steps:
            loss = training.step()
            progress.update()
            progress.set_postfix(loss=f"{loss:.3f}")
            dies = training.step_number == kill_at
            if training.step_number % save_every == 0 or dies:
                save(training.state_dict(), path, _die if dies else lambda: None)
    return training


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/resume"), help="of the checkpoint; %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    parser.add_argument("--save-every", type=int, default=10, help="default: 10")
    parser.add_argument("--kill-at", type=int, help="kill this process at that step, while it saves a checkpoint")
    parser.add_argument(
        "--weights",
        choices=("float32", "float16"),
        default="float32",
        help="float32 weights of a converted model, or a model made .half() with masters; default: float32",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    options = parser.parse_args()
    training = run(options.folder, options.steps, options.save_every, options.kill_at, options.weights, options.device)
    scale = training.optimizer.loss_scaler.state_dict()
    print(f"step {training.step_number}, loss scale {scale['scale']:g} after {scale['good_steps']} good steps")
    print(f"state {digest(training.state_dict())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
