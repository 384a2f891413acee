"""A sensitivity is plain data: it merges, and files hold it."""

from __future__ import annotations

import json
import math
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autocastfx
from autocastfx import Sensitivity
from autocastfx.errors import AutocastFXError, SensitivityError
from autocastfx.plan.sensitivity import Effect, added, rms

NUMBERS = st.integers(-9999, 9999).map(lambda digits: digits / 1024)  # of four digits, which a file keeps
SIGNATURE = st.tuples(NUMBERS, NUMBERS)
TEXT = st.text(max_size=5)
NAMED = st.dictionaries(TEXT, SIGNATURE, max_size=2)
EFFECT = st.builds(Effect, st.sampled_from(["train", "eval"]), TEXT, TEXT, TEXT, SIGNATURE, NAMED, NAMED, st.booleans())
EFFECTS = st.lists(EFFECT, max_size=4, unique_by=lambda e: (e.mode, e.key)).map(tuple)
MEASURED = st.builds(Sensitivity, st.just("gradient"), st.just("bfloat16"), st.just(2), st.just(1), EFFECTS)

LINEAR = Effect("train", "linear", "linear", "head", (3e-3, -4e-3), {"x": (1e-3, 0.0)}, {"x": (0.0, 2e-3)})
ONE = Sensitivity("gradient", "bfloat16", 2, 1, (LINEAR,), {"lstm": "its kernel in 16 bits raises: no"})


@settings(max_examples=100)
@given(MEASURED)
def test_json_and_back(measured: Sensitivity) -> None:
    again = Sensitivity.from_json(measured.to_json())
    assert again.to_json() == measured.to_json()
    assert pickle.loads(pickle.dumps(measured)) == measured
    for effect, other in zip(measured.effects, again.effects, strict=True):
        assert other.key == effect.key
        for number, kept in zip(effect.computes, other.computes, strict=True):
            assert kept == pytest.approx(number, rel=5e-4)


@settings(max_examples=100)
@given(MEASURED, MEASURED)
def test_merging_appends_the_numbers_of_further_batches(first: Sensitivity, then: Sensitivity) -> None:
    both = first.merged(then)
    assert both.batches == 2
    ours, theirs = ({(e.mode, e.key): e for e in s.effects} for s in (first, then))
    for effect in both.effects:
        parts = [held[effect.mode, effect.key] for held in (ours, theirs) if (effect.mode, effect.key) in held]
        if len(parts) == 2:
            assert effect.computes == (*parts[0].computes, *parts[1].computes)
            assert effect.reads.keys() == parts[0].reads.keys() & parts[1].reads.keys()
            assert effect.overflows is any(part.overflows for part in parts)
        else:
            assert effect == parts[0]


def test_the_error_of_a_node_is_of_its_kernel_and_its_reads_together() -> None:
    assert LINEAR.error == pytest.approx(math.sqrt((4e-3**2 + 4e-3**2) / 2))
    assert ONE["linear"] is LINEAR
    assert rms(()) == 0.0
    assert added([(1.0, 2.0), (3.0, 4.0)]) == (4.0, 6.0)
    with pytest.raises(KeyError, match="no node 'conv' was measured"):
        ONE["conv"]


def test_a_bias_is_what_all_batches_have_in_common() -> None:
    measured = replace(ONE, probes=4, batches=2)
    assert measured.bias((1.0, 2.0, 9.0, 9.0, 1.0, 2.0, -9.0, -9.0)) == rms((1.0, 2.0))  # half of the probes tell
    assert measured.bias((1.0, 2.0, 9.0, 9.0, -1.0, -2.0, 9.0, 9.0)) == 0.0
    assert ONE.batches == 1
    assert ONE.bias(LINEAR.computes) == 0.0, "one batch tells nothing"
    generator = random.Random(0)
    noise = [generator.gauss(0.0, 1.0) for _ in range(4000)]
    many = replace(ONE, probes=4, batches=1000)
    assert many.bias(tuple(noise)) < 3 * many.least_bias(1.0) < 0.15, "what is independent is no bias"
    assert ONE.least_bias(1.0) == math.inf
    assert many.bias(tuple(0.5 + one for one in noise)) == pytest.approx(0.5, abs=0.1)


def test_the_squared_error_of_jumps_grows_with_the_change() -> None:
    """Of the last two projections of each batch, the jumps have opposite signs: half their difference."""
    smooth = (1.0, -1.0, 2.0, 2.0)
    jumps = (3.0, 1.0, 3.0, -3.0, -1.0, -1.0, 3.0, -3.0)
    both = tuple(a + b for a, b in zip(smooth * 2, jumps, strict=True))
    measured = replace(ONE, probes=4, batches=2)
    assert measured.error([both]) == rms(both)
    measured = replace(measured, jumps_at=rms(both))
    assert measured.error([both]) == pytest.approx(rms(both))
    measured = replace(measured, jumps_at=4 * rms(both))
    share = 9.0 / (9.0 + 4.0)
    assert measured.error([both]) == pytest.approx(rms(both) * math.sqrt(1 - share + 4 * share))
    assert measured.error([smooth]) == rms(smooth)
    assert measured.error([both, both]) == pytest.approx(2 * rms(both) * math.sqrt(1 - share + 2 * share))
    assert measured.error([]) == 0.0


def test_jumps_are_scaled_to_their_true_error_where_they_were_measured() -> None:
    jumps = (0.0, 0.0, 3.0, -3.0)
    measured = replace(ONE, probes=4, batches=1, jumps_at=rms(jumps), jumps_true=rms(jumps) / 2)
    assert measured.error([jumps]) == pytest.approx(rms(jumps) / 2)
    half = tuple(number / 2 for number in jumps)
    assert measured.error([half]) == pytest.approx(rms(jumps) / 2 / math.sqrt(2))  # the square is halved
    smooth = (1.0, -1.0, 2.0, 2.0)
    assert measured.error([smooth]) == rms(smooth)


def test_the_plan_at_which_gradients_jump_is_a_mean_over_batches() -> None:
    first, then = replace(ONE, jumps_at=1.0), replace(ONE, batches=3, jumps_at=2.0)
    assert first.merged(then).jumps_at == pytest.approx(math.sqrt((1 + 3 * 4) / 4))
    assert ONE.merged(ONE).jumps_at == 0.0
    assert Sensitivity.from_json(then.to_json()).jumps_at == 2.0
    first, then = replace(first, jumps_true=3.0), replace(then, jumps_true=1.0)
    assert first.merged(then).jumps_true == pytest.approx(math.sqrt((9 + 3 * 1) / 4))
    assert Sensitivity.from_json(first.to_json()).jumps_true == 3.0
    not_measured = replace(first, jumps_true=0.0)  # on this batch: it stays as predicted
    assert not_measured.merged(then).jumps_true == pytest.approx(math.sqrt((1 + 3 * 1) / 4))


def test_in_words() -> None:
    assert str(ONE) == (
        "sensitivity of the gradient to bfloat16: 1 nodes, 1 batches of 2 probes; the most sensitive: linear (linear), "
        "4.0e-03; 1 nodes not measured"
    )


def test_a_file_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "sensitivity.json"
    ONE.save(path)
    assert Sensitivity.load(path) == ONE
    assert len(path.read_text().splitlines()) == 3  # a node each, between head and end


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no sensitivity"),
        ("[]", "holds no sensitivity"),
        ("{}", "holds no sensitivity"),
        (json.dumps({**json.loads(ONE.to_json()), "autocastfx_sensitivity": 9}), "is version 9 of the format, not 1"),
        (json.dumps({**json.loads(ONE.to_json()), "effects": [{}]}), "holds no sensitivity"),
        (json.dumps({**json.loads(ONE.to_json()), "extra": 1}), "holds no sensitivity"),
        (ONE.to_json().replace('"mode": "train"', '"mode": "training"'), "a mode is train or eval, not 'training'"),
    ],
)
def test_a_wrong_file_is_one_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(SensitivityError, match=said) as raised:
        Sensitivity.load(path)
    assert "Measure again" in str(raised.value)
    assert isinstance(raised.value, AutocastFXError)


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SensitivityError, match=r"cannot read .*: No such file"):
        Sensitivity.load(tmp_path / "none.json")


@pytest.mark.parametrize("change", [{"of": "output"}, {"dtype": "float16"}, {"probes": 3}])
def test_other_measurements_do_not_merge(change: dict[str, Any]) -> None:
    with pytest.raises(SensitivityError, match="measure both alike"):
        ONE.merged(replace(ONE, **change))


def test_it_is_public() -> None:
    assert autocastfx.Sensitivity is Sensitivity


def test_it_is_shown_in_a_line() -> None:
    effects = tuple(Effect("train", f"mm_{i}", "mm", "", (0.1,) * 99) for i in range(99))
    found = Sensitivity("gradient", "bfloat16", 99, 1, effects)
    assert repr(found) == f"Sensitivity({found})"
    assert len(repr(found)) < 300
