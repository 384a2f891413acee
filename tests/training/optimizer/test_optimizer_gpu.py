"""LossScalingOptimizer on a CUDA device: a step makes the host wait for nothing, and a CUDA graph can hold it whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import DynamicLossScale, LossScalingOptimizer

pytestmark = pytest.mark.gpu

SCALE = 2.0**10
WARM = 3  # steps before the one that is captured


class Training:
    """A model, an optimizer, and inputs that stay where they are, as CUDA graphs want them."""

    def __init__(self, dtype: torch.dtype | None, *, capturable: bool) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
        self.x, self.y = torch.randn(8, 16, device="cuda"), torch.randn(8, 4, device="cuda")
        self.good = self.y.clone()
        self.model = plain if dtype is None else autocastfx.convert(plain, (self.x,), dtype=dtype)
        adamw = torch.optim.AdamW(self.model.parameters(), 0.01, fused=True, capturable=capturable)
        self.optimizer = LossScalingOptimizer(adamw, DynamicLossScale(init=SCALE))

    def step(self) -> None:
        self.optimizer.backward((self.model(self.x) - self.y).square().mean())
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()

    def eager_step(self) -> None:
        self.optimizer.zero_grad()
        self.step()

    def captured_step(self) -> Callable[[], None]:
        """Steps to warm up, on a stream of their own, then one into a graph; what replays it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.eager_step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def overflows(self, does: bool) -> None:
        self.y.fill_(math.inf) if does else self.y.copy_(self.good)

    def held(self) -> list[Tensor]:
        """Weights and state, as they are now."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.detach().clone() for t in (*self.model.parameters(), *state)]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_a_captured_step_skips_and_recovers(dtype: torch.dtype | None) -> None:
    training = Training(dtype, capturable=True)
    replay = training.captured_step()
    replay()
    before = training.held()
    for count in (1, 2):
        training.overflows(True)
        replay()
        assert all(torch.equal(a, b) for a, b in zip(training.held(), before, strict=True))
        assert training.optimizer.loss_scaler.value == SCALE / 2**count
    training.overflows(False)
    replay()
    assert training.optimizer.loss_scaler.value == SCALE / 4
    assert not any(torch.equal(a, b) for a, b in zip(training.held(), before, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_a_captured_step_computes_what_an_eager_one_does(dtype: torch.dtype | None) -> None:
    captured, eager = Training(dtype, capturable=True), Training(dtype, capturable=True)
    replay = captured.captured_step()
    for _ in range(WARM):
        eager.eager_step()
    for does in (False, True, False, False):
        captured.overflows(does)
        eager.overflows(does)
        replay()
        eager.eager_step()
    assert captured.optimizer.loss_scaler.state_dict() == eager.optimizer.loss_scaler.state_dict()
    bound = 64 * torch.finfo(dtype or torch.float32).eps  # roundings: other matrix kernels may be chosen in a graph
    for a, b in zip(captured.held(), eager.held(), strict=True):
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("steps", [4, 40])
def test_a_step_makes_the_host_wait_for_nothing(steps: int) -> None:
    """Not when it overflows either, nor when the floor comes nearer: the scale is sent for in time."""
    training = Training(torch.float16, capturable=False)
    for _ in range(2):  # the first one makes the optimizer's state, and reads a number
        training.eager_step()
    before = training.held()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(steps):
            training.overflows(step == 1)
            training.eager_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not training.optimizer.last_step.skipped
    assert training.optimizer.loss_scaler.value == SCALE / 2
    assert not torch.equal(training.held()[0], before[0])
