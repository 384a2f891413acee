"""When the host looks at a loss scale that lives on a device."""

from __future__ import annotations

import pytest
import torch

from autocastfx import DynamicLossScale, LossScaler
from autocastfx.host_copy import HostCopy, Seen

ZERO, ONE = torch.zeros(()), torch.ones(())


class Slow(HostCopy):
    """A copy that arrives ``delay`` steps after it was sent for, as from a busy GPU."""

    def __init__(self, delay: int) -> None:
        super().__init__()
        self.delay, self.reads, self.sent = delay, 0, None
        self.age = 0

    def start(self, number: torch.Tensor) -> None:
        if self.sent is None:
            self.sent, self.age = float(number), 0

    def arrived(self) -> Seen | None:
        self.age += 1
        if self.sent is None or self.age < self.delay:
            return None
        sent, self.sent = self.sent, None
        return Seen(sent, self.age)

    def read(self, number: torch.Tensor) -> Seen:
        self.reads += 1
        self.sent = None
        return Seen(float(number), 0)


def _run(scaler: LossScaler, founds: list[torch.Tensor]) -> list[bool]:
    optimizer = object()
    results = []
    for found in founds:
        scaler.scale(ONE, optimizer)
        results.append(scaler.stepped(optimizer, found, None))
    return results


def test_far_from_the_floor_the_host_never_waits() -> None:
    scaler = LossScaler(DynamicLossScale())
    scaler._copy = copy = Slow(delay=3)
    assert not any(_run(scaler, [ZERO] * 200))
    assert copy.reads == 0


def test_without_copies_in_the_background_the_host_looks_once_in_sixteen_steps() -> None:
    scaler = LossScaler(DynamicLossScale())
    scaler._copy = copy = Slow(delay=10**6)
    assert not any(_run(scaler, [ZERO] * 160))
    assert copy.reads == 10


@pytest.mark.parametrize("delay", [1, 3, 7, 20])
@pytest.mark.parametrize("good", [0, 1, 5, 9])
def test_the_overflow_at_the_floor_is_found_in_its_own_step(delay: int, good: int) -> None:
    scaler = LossScaler(DynamicLossScale(2.0**6))
    scaler._copy = Slow(delay)
    results = _run(scaler, [ZERO] * good + [ONE] * 7)
    assert results == [False] * (good + 6) + [True]
    assert scaler.value == 1.0


def test_a_scale_that_starts_at_its_floor_is_watched_at_once() -> None:
    assert _run(LossScaler(DynamicLossScale(1.0)), [ZERO, ONE]) == [False, True]


def test_it_can_grow_away_from_the_floor() -> None:
    scaler = LossScaler(DynamicLossScale(2.0, interval=2))
    assert _run(scaler, [ONE, ZERO, ZERO, ONE, ONE]) == [False, False, False, False, True]


def test_an_optimizer_that_is_gone_does_not_hold_up_the_others() -> None:
    class Owner:
        pass

    scaler = LossScaler(DynamicLossScale(2.0**6))
    one, two, gone = Owner(), Owner(), Owner()
    for owner in (one, two, gone):
        scaler.join(owner)
    scaler.scale(ONE, gone)
    scaler.scale(ONE, one)
    scaler.stepped(one, ONE, None)
    assert scaler.value == 2.0**6
    del gone
    assert scaler.value == 2.0**6 or scaler.value == 2.0**5
    del owner
    assert scaler.value == 2.0**5


def test_an_unused_scaler_has_the_rules_first_scale() -> None:
    scaler = LossScaler(DynamicLossScale(8.0))
    assert scaler.value == 8.0
    assert scaler.state_dict() == {"scale": 8.0, "good_steps": 0, "spare": 1}
    scaler.load_state_dict({"scale": 4.0, "good_steps": 3, "spare": 2})
    assert scaler.value == 4.0
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 3, "spare": 2}


def test_a_loaded_scale_counts_its_way_to_the_floor_anew() -> None:
    scaler = LossScaler(DynamicLossScale())
    scaler.load_state_dict({"scale": 2.0, "good_steps": 0})
    assert _run(scaler, [ONE, ONE]) == [False, True]


def test_on_a_cpu_a_number_is_read_at_once() -> None:
    copy = HostCopy()
    copy.start(torch.tensor(3.0))
    assert copy.arrived() is None
    assert copy.read(torch.tensor(3.0)) == Seen(3.0, 0)


@pytest.mark.gpu
def test_on_a_gpu_a_copy_arrives_without_waiting() -> None:
    copy, number = HostCopy(), torch.tensor(3.0, device="cuda")
    copy.start(number)
    torch.cuda.synchronize()
    number.fill_(4.0)
    assert copy.arrived() == Seen(3.0, 1)
    assert copy.arrived() is None
    assert copy.read(number) == Seen(4.0, 0)


def test_a_state_made_on_a_cpu_moves_to_the_device_of_the_losses() -> None:
    scaler = LossScaler(DynamicLossScale(8.0))
    scaler.state_dict()  # before any loss
    state = scaler.state(torch.device("meta"))
    assert {t.device.type for t in (state.scale, state.good_steps, state.spare)} == {"meta"}
    assert scaler.state(torch.device("cpu")) is state
