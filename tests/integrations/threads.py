"""Rounds of threads that enable, compile, call and disable models: ``python -m tests.integrations.threads ROUNDS``.

In a process of its own, which a fault of Dynamo's would end. The last line says what was wrong.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import UncapturedGraphWarning

X = torch.linspace(-1, 1, 128).reshape(8, 16)
THREADS = 8


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


class Skipped(Broken):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = Scaled.apply(self.first(x))
            if x.sum() > 1e9:
                x = x * 0.5
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def plain() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())


def compile_and_call(model: nn.Module) -> None:
    exact = model(X)
    model.compile(backend="eager")
    assert torch.allclose(model(X), exact, atol=1e-5)


def enable_and_call(model: nn.Module) -> None:
    exact = model(X)
    autocastfx.enable(model, dtype=torch.bfloat16)
    model(X)  # code that another thread makes Dynamo skip in this moment runs in float32, and is told in the next call
    error = (model(X).float() - exact).abs().max()
    assert 0 < error < 0.1, error
    backend = autocastfx.backend_of(model)
    assert isinstance(backend, CompileBackend)
    assert backend.graphs
    assert bool(backend.skipped) == isinstance(model, Skipped), backend.skipped
    autocastfx.disable(model)
    assert torch.equal(model(X), exact)


KINDS: tuple[Callable[[], nn.Module], ...] = (plain, Broken, Skipped, Attention)
USES = (enable_and_call, compile_and_call)


def run(rounds: int) -> list[str]:
    """Return the errors of all threads."""
    errors: list[str] = []

    def use(kind: Callable[[], nn.Module], how: Callable[[nn.Module], None]) -> None:
        try:
            how(kind())
        except Exception:
            errors.append(traceback.format_exc())

    warnings.simplefilter("ignore", UncapturedGraphWarning)
    before = torch.autograd.Function.__dict__["apply"], torch.backends.mha.get_fastpath_enabled()
    for number in range(rounds):
        # The first round enables alone: torch's own modules are not all ready for threads that import them at once.
        given = [(KINDS[(i // 2 + number) % len(KINDS)], USES[i % 2 if number else 0]) for i in range(THREADS)]
        threads = [threading.Thread(target=use, args=one) for one in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if before != (torch.autograd.Function.__dict__["apply"], torch.backends.mha.get_fastpath_enabled()):
        errors.append("something stays patched")
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run(int(sys.argv[1]))
    print(*found, f"{len(found)} errors", sep="\n")
