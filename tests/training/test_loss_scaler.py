"""A loss scale at work: when the host looks at it, rounds of several optimizers, states that it takes and refuses."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from autocastfx import DynamicLossScale, LossScaler, NoLossScale, StaticLossScale
from autocastfx.errors import LossScaleError
from autocastfx.training.loss_scale import HostCopy, LossScale, Seen

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


class Owner:
    """An optimizer as far as a scale knows one."""

    def __init__(self) -> None:
        self.weight = torch.zeros((), requires_grad=True)

    def model_parameters(self) -> list[torch.Tensor]:
        return [self.weight]


def _run(scaler: LossScaler, founds: list[torch.Tensor]) -> list[bool]:
    optimizer = Owner()
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
    for steps, reads in ((15, 0), (1, 1), (15, 1), (1, 2), (128, 10)):
        assert not any(_run(scaler, [ZERO] * steps))
        assert copy.reads == reads


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


# ---- rounds of a shared scale ---------------------------------------------------------------------------------------


def _shared(rule: DynamicLossScale) -> tuple[LossScaler, Owner, Owner]:
    scaler, one, two = LossScaler(rule), Owner(), Owner()
    scaler.rounds.join(one)
    scaler.rounds.join(two)
    return scaler, one, two


def test_a_shared_scale_is_updated_once_a_round_by_hand() -> None:
    scaler, one, two = _shared(DynamicLossScale(2.0**6, interval=2))
    for founds, scale in [((ONE, ONE), 2.0**5), ((ZERO, ONE), 2.0**4), ((ZERO, ZERO), 2.0**4), ((ZERO, ZERO), 2.0**5)]:
        before = scaler.value
        scaler.scale(ONE)
        scaler.stepped(one, founds[0], None)
        scaler.stepped(two, founds[1], None)
        assert scaler.value == before
        scaler.update()
        assert scaler.value == scale


def test_looking_at_a_shared_scale_changes_nothing() -> None:
    def run(looks: bool) -> dict[str, float | int]:
        scaler, one, two = _shared(DynamicLossScale(2.0**6))
        for owner in (one, two):
            scaler.scale(ONE, owner)
        for owner in (one, two):
            scaler.rounds.check(owner)
            scaler.stepped(owner, ONE, None)
            if looks:
                assert scaler.value == scaler.state_dict()["scale"] == 2.0**6
        scaler.update()
        return scaler.state_dict()

    assert run(looks=True) == run(looks=False) == {"scale": 2.0**5, "good_steps": 0, "spare": 1}


def test_a_second_step_in_a_round_is_refused() -> None:
    scaler, one, two = _shared(DynamicLossScale(2.0**6))
    scaler.scale(ONE)
    scaler.stepped(one, ZERO, None)
    scaler.rounds.check(two)
    scaler.scale(ONE)
    with pytest.raises(LossScaleError, match=r"has stepped since the last update .* call loss_scaler\.update\(\) once"):
        scaler.rounds.check(one)
    scaler.update()
    scaler.scale(ONE)
    scaler.rounds.check(one)


def test_a_round_without_a_step_cannot_end() -> None:
    scaler, one, _ = _shared(DynamicLossScale(2.0**6))
    with pytest.raises(LossScaleError, match="no optimizer has stepped since the last update of the scale"):
        scaler.update()
    scaler.stepped(one, None, None)  # without gradients: says nothing
    scaler.update()
    assert scaler.state_dict()["good_steps"] == 0


def test_a_loss_of_one_optimizer_is_not_another_ones() -> None:
    scaler, one, two = _shared(DynamicLossScale(2.0**6))
    scaler.scale(ONE, one)
    scaler.rounds.check(one)
    with pytest.raises(LossScaleError, match=r"no loss was scaled .* share a scale, loss_scaler\.scale\(loss\)"):
        scaler.rounds.check(two)


def test_gradients_that_add_up_over_an_update_are_refused() -> None:
    scaler, one, two = _shared(DynamicLossScale(2.0**6))
    scaler.scale(ONE)
    scaler.stepped(one, ONE, None)
    scaler.update()
    two.weight.grad = ONE
    scaler.scale(ONE)
    scaler.rounds.check(one)
    with pytest.raises(LossScaleError, match="the shared scale was updated while gradients were added up"):
        scaler.rounds.check(two)
    two.weight.grad = None  # by model.zero_grad(), say
    scaler.scale(ONE)
    scaler.rounds.check(two)


def test_a_loss_counts_when_it_goes_backward() -> None:
    scaler, one = LossScaler(DynamicLossScale()), Owner()
    loss = scaler.scale(torch.ones((), requires_grad=True), one)
    assert not scaler.rounds.is_scaled(one)
    loss.backward()
    assert scaler.rounds.is_scaled(one)


def test_the_update_of_a_scale_that_is_not_shared_is_the_steps() -> None:
    scaler = LossScaler(DynamicLossScale(interval=2))
    _run(scaler, [ZERO])
    scaler.update()
    assert scaler.state_dict()["good_steps"] == 1
    LossScaler(NoLossScale()).update()


# ---- states ---------------------------------------------------------------------------------------------------------


STATE = {"scale": 64.0, "good_steps": 3, "spare": 1}
WRONG: dict[str, tuple[LossScale, dict[str, Any], str]] = {
    "zero": (DynamicLossScale(), {"scale": 0.0}, r"positive finite number, in float32 too, and the state holds 0\.0"),
    "negative": (DynamicLossScale(), {"scale": -2.0}, "positive finite number"),
    "underflow": (DynamicLossScale(min=1e-50), {"scale": 1e-46}, "positive finite number, in float32 too"),
    "inf": (DynamicLossScale(), {"scale": math.inf}, "positive finite number, .* inf"),
    "NaN": (DynamicLossScale(), {"scale": math.nan}, "positive finite number, .* nan"),
    "text": (DynamicLossScale(), {"scale": "8"}, "positive finite number, .* '8'"),
    "above": (DynamicLossScale(), {"scale": 2.0**25}, r"3.35544e\+07, which is not between min=1 and max=1.67772e\+07"),
    "below": (DynamicLossScale(min=2.0), {"scale": 1.0}, "the loss scale 1, which is not between min=2 and max"),
    "negative count": (DynamicLossScale(), {"good_steps": -1}, "'good_steps' .* whole number of at least 0, not -1"),
    "fraction": (DynamicLossScale(), {"spare": 0.5}, r"'spare' .* whole number of at least 0, not 0\.5"),
    "dynamic into none": (
        NoLossScale(),
        {},
        r"64, but the scale of NoLossScale\(\) is always 1: give the rule of the run",
    ),
    "dynamic into static": (StaticLossScale(8.0), {}, r"64, but the scale of StaticLossScale\(.*\) is always 8"),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("rule", "change", "message"), WRONG.values(), ids=WRONG)
def test_a_state_that_no_such_run_has_is_refused_and_changes_nothing(
    rule: LossScale, change: dict[str, Any], message: str, used: bool
) -> None:
    scaler = LossScaler(rule)
    if used:
        _run(scaler, [ZERO])
    before = scaler.state_dict()
    with pytest.raises(LossScaleError, match=message):
        scaler.load_state_dict(STATE | change)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "rule",
    [NoLossScale(), StaticLossScale(0.1), DynamicLossScale(0.1, min=0.1, max=0.1), DynamicLossScale(hysteresis=3)],
    ids=str,
)
def test_a_state_of_its_own_is_taken(rule: LossScale) -> None:
    scaler, again = LossScaler(rule), LossScaler(rule)
    if rule.is_checked:
        _run(scaler, [ZERO])
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


def test_counters_beyond_a_rules_are_its_largest() -> None:
    scaler = LossScaler(DynamicLossScale(8.0, interval=4, hysteresis=2))
    scaler.load_state_dict({"scale": 4.0, "good_steps": 7, "spare": 5})
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 3, "spare": 2}
    _run(scaler, [ZERO])
    assert scaler.value == 8.0  # it has waited long enough


def test_a_gradscalers_state_restores_what_hysteresis_tolerates() -> None:
    scaler = LossScaler(DynamicLossScale(8.0, hysteresis=3))
    _run(scaler, [ONE])
    scaler.load_state_dict({"scale": 4.0, "_growth_tracker": 0})
    assert scaler.state_dict()["spare"] == 3


def test_an_unused_scaler_has_the_rules_first_scale() -> None:
    scaler = LossScaler(DynamicLossScale(8.0))
    assert scaler.value == 8.0
    assert scaler.state_dict() == {"scale": 8.0, "good_steps": 0, "spare": 1}
    scaler.load_state_dict({"scale": 4.0, "good_steps": 3, "spare": 1})
    assert scaler.value == 4.0
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 3, "spare": 1}


def test_a_scale_that_was_loaded_and_not_yet_used_is_pickled() -> None:
    scaler = LossScaler(DynamicLossScale(8.0))
    scaler.load_state_dict({"scale": 4.0, "good_steps": 3, "spare": 1})
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == {"scale": 4.0, "good_steps": 3, "spare": 1}


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
