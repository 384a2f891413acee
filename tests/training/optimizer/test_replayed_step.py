"""Steps that are recorded once and replayed, as by a CUDA graph: Python sees nothing of what happens in a replay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import DynamicLossScale, LossScalingOptimizer
from autocastfx.errors import LossScaleError
from autocastfx.training import loss_scaler, optimizer
from autocastfx.training.loss_scaler import LossScaler
from tests.training.recorded import Recorded, record

SCALE = 2.0**10


class Training:
    """A model, an optimizer, and inputs that stay where they are."""

    def __init__(self, dtype: torch.dtype | None = None, scale: LossScaler | None = None) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4))
        self.x, self.y = torch.randn(3, 8), torch.randn(3, 4)
        self.good = self.y.clone()
        self.model = plain if dtype is None else autocastfx.convert(plain, (self.x,), dtype=dtype)
        adamw = torch.optim.AdamW(self.model.parameters(), 0.01, fused=True)
        self.optimizer = LossScalingOptimizer(adamw, scale or DynamicLossScale(init=SCALE))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.backward((self.model(self.x) - self.y).square().mean())
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()

    def overflows(self, does: bool) -> None:
        self.y.fill_(math.inf) if does else self.y.copy_(self.good)

    def held(self) -> list[Tensor]:
        """Weights and state, as they are now."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.detach().clone() for t in (*self.model.parameters(), *state)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_a_replayed_step_is_an_eager_one_to_the_bit(dtype: torch.dtype | None) -> None:
    """Skipped steps too; and the host reads nothing in it."""
    replayed, eager = Training(dtype), Training(dtype)
    for _ in range(2):
        replayed.step()
        eager.step()
    recorded = record(replayed.step)
    eager.step()
    for does in (False, True, True, False, False):
        replayed.overflows(does)
        eager.overflows(does)
        before = replayed.held()
        recorded.replay()
        eager.step()
        assert same(replayed.held(), before) is does
        assert same(replayed.held(), eager.held())
        assert replayed.optimizer.loss_scaler.value == eager.optimizer.loss_scaler.value


def test_a_step_that_the_host_decides_on_cannot_be_recorded() -> None:
    training = Training()
    training.optimizer = LossScalingOptimizer(torch.optim.SGD(training.model.parameters(), 0.1), DynamicLossScale())
    training.step()
    with pytest.raises(RuntimeError, match="the host reads a number"):
        record(training.step)


@pytest.mark.parametrize("fused", [False, True])
def test_a_capture_that_would_ask_the_host_says_what_to_do(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fused optimizer too, while all steps were skipped: it has no state yet."""
    training = Training()
    adamw = torch.optim.AdamW(training.model.parameters(), 0.01, fused=fused)
    training.optimizer = LossScalingOptimizer(adamw, DynamicLossScale())
    training.overflows(fused)
    training.step()
    assert training.optimizer.last_step.skipped is fused
    weights = [p.detach().clone() for p in training.model.parameters()]
    monkeypatch.setattr(optimizer, "is_capturing", lambda _: True)
    with pytest.raises(LossScaleError, match=r"which a CUDA graph cannot ask\. Use a fused optimizer"):
        training.step()
    assert same(list(training.model.parameters()), weights)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Training, Training]:
    """Two that share a scale. While something is recorded, a graph is being captured."""
    capturing = []
    monkeypatch.setattr(loss_scaler, "is_capturing", lambda _: bool(capturing))
    monkeypatch.setattr(Recorded, "__enter__", lambda self: (capturing.append(1), super(Recorded, self).__enter__())[1])
    leave = Recorded.__exit__
    monkeypatch.setattr(Recorded, "__exit__", lambda self, *error: (capturing.clear(), leave(self, *error))[1])
    first = Training()
    second = Training(scale=first.optimizer.loss_scaler)
    for _ in range(2):
        both(first, second)
    return first, second


def both(first: Training, second: Training) -> None:
    first.step()
    second.step()
    first.optimizer.loss_scaler.update()


def test_a_shared_scale_sees_the_overflow_of_a_replay(pair: tuple[Training, Training]) -> None:
    """Wherever it is updated: in the graph, or by the host after graphs of its own for each step."""
    first, second = pair
    scaler = first.optimizer.loss_scaler
    whole = record(lambda: both(first, second))
    for overflowing, expected in ((second, SCALE / 2), (first, SCALE / 4), (None, SCALE / 4)):
        for one in pair:
            one.overflows(one is overflowing)
        whole.replay()
        assert scaler.value == expected
    steps = [record(one.step) for one in pair]
    scaler.update()
    for overflowing, expected in ((second, SCALE / 8), (None, SCALE / 8), (first, SCALE / 16)):
        for one in pair:
            one.overflows(one is overflowing)
        for step in steps:
            step.replay()
        scaler.update()
        assert scaler.value == expected


def test_one_is_replayed_and_the_other_steps_itself(pair: tuple[Training, Training]) -> None:
    first, second = pair
    scaler = first.optimizer.loss_scaler
    replayed = record(first.step)
    second.step()
    scaler.update()
    for does, expected in ((True, SCALE / 2), (False, SCALE / 2), (True, SCALE / 4)):
        first.overflows(does)
        replayed.replay()
        second.step()
        scaler.update()
        assert scaler.value == expected


def test_without_graphs_an_update_without_a_step_is_refused(pair: tuple[Training, Training]) -> None:
    with pytest.raises(LossScaleError, match="no optimizer has stepped"):
        pair[0].optimizer.loss_scaler.update()
