"""Ranges are plain data: they merge, and files hold them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autocastfx import Ranges
from autocastfx.errors import AutocastFXError, CalibrationError
from autocastfx.graph.magnitude import Magnitude
from autocastfx.plan.ranges import Range

TEXT = st.text(max_size=6)
MAGNITUDES = st.floats(0, float(torch.finfo(torch.float32).max))
RANGE = st.builds(
    Range, st.sampled_from(["train", "eval"]), TEXT, TEXT, TEXT, MAGNITUDES, MAGNITUDES, st.integers(0, 9)
)
RANGES = st.builds(
    Ranges, st.lists(RANGE, max_size=5, unique_by=lambda r: (r.mode, r.key)).map(tuple), st.integers(0, 9)
)
ONE = Ranges((Range("eval", "linear", "linear", "layer", 2.5, 0.5, 1),), 3)


@settings(max_examples=100)
@given(RANGES)
def test_json_and_back(ranges: Ranges) -> None:
    again = Ranges.from_json(ranges.to_json())
    assert again == ranges
    assert again.to_json() == ranges.to_json()
    assert pickle.loads(pickle.dumps(ranges)) == ranges


@settings(max_examples=100)
@given(RANGES, RANGES)
def test_merging_takes_the_larger(a: Ranges, b: Ranges) -> None:
    both = a.merged(b)
    assert both.batches == a.batches + b.batches
    for mode in ("train", "eval"):
        held = [{r.key: r for r in ranges.values if r.mode == mode} for ranges in (a, b, both)]
        assert held[2].keys() == held[0].keys() | held[1].keys()
        for key, one in held[2].items():
            parts = [h[key] for h in held[:2] if key in h]
            assert one.largest == max(p.largest for p in parts)
            assert one.rms == max(p.rms for p in parts)
            assert one.non_finite == sum(p.non_finite for p in parts)
    assert {(r.mode, r.key): r.largest for r in b.merged(a).values} == {(r.mode, r.key): r.largest for r in both.values}


def test_one_value_a_line() -> None:
    lines = ONE.to_json().splitlines()
    assert json.loads(lines[1]) == {
        "mode": "eval",
        "name": "linear",
        "op": "linear",
        "module": "layer",
        "largest": 2.5,
        "rms": 0.5,
        "non_finite": 1,
    }
    assert len(lines) == 3


def test_a_mode_falls_back_on_the_other_as_a_whole() -> None:
    key = ("linear", "linear", "layer")
    assert ONE.magnitudes("train") == ONE.magnitudes("eval") == {key: Magnitude(2.5, 0.5)}
    both = ONE.merged(Ranges((Range("train", "tanh", "tanh", "", 1.0, 0.25),), 1))
    assert both.magnitudes("train") == {("tanh", "tanh", ""): Magnitude(1.0, 0.25)}


VALUE = '{"mode": "eval", "name": "a", "op": "a", "module": "", "largest": 1.0, "rms": 0.5, "non_finite": 0}'
HEAD = '{"autocastfx_ranges": 2, "batches": 1, "values": [\n'
WRONG = {
    "nothing": ("", "1:1: this is not JSON: Expecting value"),
    "cut off": (HEAD + VALUE + ",\n", "3:1: this is not JSON: Expecting value"),
    "a list": ("[]", "1:1: these are no ranges: the key 'autocastfx_ranges' is missing"),
    "another file": ('{"low": "float16"}', "1:1: these are no ranges: the key 'autocastfx_ranges' is missing"),
    "version": (
        '{\n "autocastfx_ranges": 1, "values": []}',
        "2:23: this is version 1 of the format, not 2",
    ),
    "batches": ('{"autocastfx_ranges": 2,\n"batches": -1, "values": []}', "2:12: 'batches' is a count, not -1"),
    "no values": ('{"autocastfx_ranges": 2, "batches": 1}', "1:1: 'values' is a list"),
    "values": ('{"autocastfx_ranges": 2, "batches": 1, "values": {}}', "1:50: 'values' is a list"),
    "a word": (
        HEAD + f'{VALUE},\n"a"]}}',
        "3:1: a value has the keys mode, name, op, module, largest, rms, non_finite",
    ),
    "a key": (HEAD + VALUE.replace("mode", "mood") + "]}", "2:1: a value has the keys mode, name"),
    "mode": (HEAD + VALUE.replace("eval", "test") + "]}", "2:10: 'mode' is one of train, eval, not 'test'"),
    "name": (HEAD + VALUE.replace('"name": "a"', '"name": 1') + "]}", "2:26: 'name' is text, not 1"),
    "negative": (
        HEAD + VALUE.replace("1.0", "-1.0") + "]}",
        "2:67: 'largest' is a finite number of at least 0, not -1.0",
    ),
    "nan": (HEAD + VALUE.replace("1.0", "NaN") + "]}", "2:67: 'largest' is a finite number of at least 0, not nan"),
    "infinite": (HEAD + VALUE.replace("1.0", "Infinity") + "]}", "2:67: 'largest' is a finite number"),
    "a truth": (HEAD + VALUE.replace("1.0", "true") + "]}", "2:67: 'largest' is a finite number of at least 0, not Tr"),
    "small": (HEAD + VALUE.replace("0.5", "-0.5") + "]}", "2:79: 'rms' is a finite number of at least 0, not -0.5"),
    "count": (HEAD + VALUE.replace(": 0}", ": 0.5}") + "]}", "2:98: 'non_finite' is a count, not 0.5"),
    "nested": ("[" * 100_000, "1:1: this is not JSON: it is nested too deeply."),
    "nested values": ('{"values": ' + "[" * 500 + "]" * 500 + "}", "1:1: this is not JSON: it is nested too deeply."),
    "digits": (
        '{"batches": ' + "1" * 5000 + "}",
        "1:13: this is not JSON: an integer has 5000 digits, too many to read.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file(name: str, tmp_path: Path) -> None:
    text, expected = WRONG[name]
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(CalibrationError) as caught:
        Ranges.load(path)
    assert str(caught.value).startswith(f"{path}:{expected}")
    assert caught.value.source is not None
    assert isinstance(caught.value, (ValueError, AutocastFXError))


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None, lambda path: path.write_bytes(b"\xff")])
def test_a_file_that_cannot_be_read(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "ranges.json")
    with pytest.raises(CalibrationError, match=r"cannot read the ranges .*ranges\.json: .*Ranges\.save writes such"):
        Ranges.load(tmp_path / "ranges.json")
