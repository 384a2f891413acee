"""Every ATen operator that meets floating values in the zoo stands in exactly one category."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autocastfx.graph.names import base_name
from autocastfx.policy.op_list import load_op_list, preset_path
from autocastfx.policy.yaml_tree import parse_file
from benchmarks.zoo import MODELS, floating_ops

PATH = Path(__file__).parent.parent / "benchmarks" / "results" / "zoo-ops.json"
OPS: dict[str, int] = json.loads(PATH.read_text())["ops"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_op_of_the_zoo_is_listed(dtype: str) -> None:
    listed = load_op_list(dtype)
    assert len(OPS) > 150
    assert [op for op in OPS if listed.rule(op) is None] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_op_is_in_two_categories(dtype: str) -> None:
    """A list cannot name an op twice, but it can name one that its parent names too, or an in-place form apart."""
    own = parse_file(preset_path(dtype), shown=dtype).child("deny").entries()
    named = {op.op_name() for group in own for op in group.child("ops").as_strings()}
    assert named.isdisjoint(load_op_list("base").rules)
    rules = load_op_list(dtype).rules
    assert [op for op in rules if base_name(op) != op and base_name(op) in rules] == []


@pytest.mark.parametrize("name", ["distilbert", "resnet", "several-outputs", "moving-average"])
def test_the_kept_count_of_ops_is_not_stale(name: str) -> None:
    """If this fails: ``python -m benchmarks.zoo --ops --json benchmarks/results/zoo-ops.json``."""
    found = floating_ops(MODELS[name])
    assert found
    assert found <= OPS.keys()


def test_what_cannot_be_captured_has_no_ops() -> None:
    assert floating_ops(MODELS["branch-on-value"]) == set()
