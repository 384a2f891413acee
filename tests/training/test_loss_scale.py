"""The rules for the loss scale against a plain-Python model of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autocastfx
from autocastfx.training.loss_scale import DynamicLossScale, NoLossScale, ScaleState, StaticLossScale

CPU = torch.device("cpu")


def float32(number: float) -> float:
    """``number`` rounded to float32, as a scale is stored."""
    return float(torch.tensor(number, dtype=torch.float32))


@dataclass
class PlainScale:
    """The rule in Python's own numbers: growth after good steps, backing off, hysteresis, floor, ceiling."""

    rule: DynamicLossScale
    scale: float = 0.0
    good: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        self.scale, self.spare = float32(self.rule.init), self.rule.hysteresis

    def step(self, overflow: bool) -> None:
        rule = self.rule
        if overflow:
            self.good = 0
            self.spare = max(self.spare - 1, 0)
            if self.spare == 0:
                self.scale = max(float32(self.scale * rule.backoff), float32(rule.min))
                if rule.hysteresis == 1:
                    self.spare = 1  # nothing to spare, nothing to restore
        else:
            self.good += 1
            if self.good == rule.interval:
                self.good, self.spare = 0, rule.hysteresis
                self.scale = min(float32(self.scale * rule.growth), float32(rule.max))


@st.composite
def rules(draw: Any) -> DynamicLossScale:
    low, high = sorted((draw(st.integers(-4, 20)), draw(st.integers(-4, 20))))
    return DynamicLossScale(
        init=2.0 ** draw(st.integers(low, high)),
        growth=draw(st.sampled_from([1.0, 1.5, 2.0, 4.0])),
        backoff=draw(st.sampled_from([0.1, 0.5, 0.75])),
        interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        min=2.0**low,
        max=2.0**high,
    )


def _numbers(state: ScaleState) -> tuple[float, int, int]:
    return float(state.scale), int(state.good_steps), int(state.spare)


@settings(max_examples=300)
@given(rules(), st.lists(st.booleans(), max_size=40))
def test_the_scale_follows_the_rule(rule: DynamicLossScale, overflows: list[bool]) -> None:
    state, plain = rule.state(CPU), PlainScale(rule)
    for overflow in overflows:
        rule.adjust(state, torch.tensor(float(overflow)))
        plain.step(overflow)
        assert _numbers(state) == (plain.scale, plain.good, plain.spare)
        assert rule.min <= float(state.scale) <= rule.max


@settings(max_examples=100)
@given(rules(), st.lists(st.booleans(), max_size=60))
def test_without_bounds_and_hysteresis_it_is_gradscalers(rule: DynamicLossScale, overflows: list[bool]) -> None:
    growth = rule.growth + 0.5  # GradScaler takes no factor of 1
    own = DynamicLossScale(2.0**8, growth, rule.backoff, rule.interval, min=2.0**-126, max=2.0**127)
    scaler = torch.amp.GradScaler("cpu", 2.0**8, growth, rule.backoff, rule.interval)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, state = torch.optim.SGD([weight], 0.0), own.state(CPU)
    for overflow in overflows:
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        own.adjust(state, torch.tensor(float(overflow)))
        assert float(state.scale) == scaler.get_scale()


@given(rules(), st.floats(2.0**-4, 2.0**20))
def test_the_floor_is_as_many_overflows_away_as_it_says(rule: DynamicLossScale, scale: float) -> None:
    count = rule.overflows_to_floor(scale)
    for _ in range(int(count) - 1):
        scale *= rule.backoff
    assert count == 0 or scale > rule.min >= scale * rule.backoff


def test_a_static_scale_and_none_never_change() -> None:
    for rule in (StaticLossScale(128.0), NoLossScale()):
        state = rule.state(CPU)
        before = _numbers(state)
        for found in (0.0, 1.0, 1.0):
            rule.adjust(state, torch.tensor(found))
        assert _numbers(state) == before == (rule.initial, 0, 1)
        assert rule.overflows_to_floor(rule.initial) == math.inf
    assert StaticLossScale(128.0).is_checked
    assert not NoLossScale().is_checked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init": 0.0}, "init is a positive finite number, not 0.0"),
        ({"min": -1.0}, "min is a positive finite number, not -1.0"),
        ({"max": math.inf}, "max is a positive finite number, not inf"),
        ({"growth": 0.5}, "growth is a finite factor of at least 1, not 0.5"),
        ({"backoff": 1.0}, "backoff is a factor between 0 and 1, not 1.0"),
        ({"interval": 0}, "interval is a whole number of at least 1, not 0"),
        ({"hysteresis": 1.5}, "hysteresis is a whole number of at least 1, not 1.5"),
        ({"init": 0.5}, "init is between min and max: 1.0 <= 0.5 <= 16777216.0 does not hold"),
    ],
)
def test_wrong_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.") + "$"):
        DynamicLossScale(**arguments)


def test_a_wrong_static_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="scale is a positive finite number, not nan"):
        StaticLossScale(math.nan)


@given(st.floats(1e-30, 1e30), st.sampled_from([1.0, 2.0, 3.0]))
def test_the_suggested_scale_is_the_largest_power_of_two_that_fits(largest: float, margin: float) -> None:
    scale = autocastfx.suggest_loss_scale(largest, margin=margin)
    assert math.frexp(scale)[0] == 0.5
    assert largest * margin * scale < 65504 <= largest * margin * scale * 2


@pytest.mark.parametrize("exponent", range(-30, 31))
def test_a_suggested_scale_is_right_where_logarithms_are_rounded(exponent: int) -> None:
    for product in (65504.0, math.nextafter(65504.0, 0.0)):
        for margin in (1.0, 1.5, 3.0):
            largest = product / margin * 2.0**exponent
            scale = autocastfx.suggest_loss_scale(largest, margin=margin)
            assert largest * margin * scale < 65504 <= largest * margin * scale * 2


@pytest.mark.parametrize(("largest", "scale"), [(1.0, 2.0**15), (65503.0, 1.0), (65504.0, 0.5), (2.0**-24, 2.0**39)])
def test_suggested_scales(largest: float, scale: float) -> None:
    assert autocastfx.suggest_loss_scale(largest) == scale


def test_no_scale_is_suggested_for_no_gradient() -> None:
    with pytest.raises(ValueError, match="largest_gradient is a positive finite number, not 0"):
        autocastfx.suggest_loss_scale(0.0)
