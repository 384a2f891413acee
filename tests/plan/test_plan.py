"""Plans are plain data."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autocastfx
from autocastfx import Plan
from autocastfx.errors import KeyPath, Source
from autocastfx.plan.plan import (
    NOT_FLOAT32,
    SUB_GRAPH,
    WIDE,
    Cause,
    Decision,
    Forced,
    Placement,
    PlannedCast,
    PlannedCopy,
    PlannedNode,
    Precision,
    Recomposed,
    Traffic,
    Why,
    select,
)
from autocastfx.policy.rule import Category

TEXT = st.text(max_size=8)
NAMES = st.from_regex(r"([a-z_]+\d*/)?[a-z_]+\d*", fullmatch=True)
SOURCES = (
    st.builds(
        Source,
        st.sampled_from(("mine.yaml", "/a b/c:d.json", "C:\\\\lists\\\\mine.yaml")),
        st.integers(1),
        st.integers(1),
    )
    | st.builds(KeyPath, st.sampled_from(("OpList", "plan", "unlisted", "list")), TEXT)
    | st.sampled_from((WIDE, NOT_FLOAT32, SUB_GRAPH, Forced("forced:of-another-version")))
)
CAUSES = st.sampled_from(Why).flatmap(lambda why: st.builds(Cause, st.just(why), st.tuples(*[NAMES] * why.count("{}"))))
DECISIONS = st.builds(Decision, st.sampled_from(Category), TEXT, SOURCES)
PLACEMENTS = st.builds(Placement, st.sampled_from(Precision), st.sampled_from(Precision), CAUSES)
NODES = st.builds(PlannedNode, TEXT, TEXT, TEXT, DECISIONS, PLACEMENTS, TEXT, TEXT)
CASTS = st.builds(PlannedCast, TEXT, TEXT, TEXT, st.lists(TEXT, max_size=3).map(tuple), st.booleans())
TRAFFIC = st.builds(Traffic, st.integers(0), st.integers(0))
RECOMPOSED = st.builds(Recomposed, TEXT, TEXT, st.lists(TEXT, max_size=3).map(tuple))
COPIES = st.builds(PlannedCopy, TEXT, TEXT, TEXT, st.lists(TEXT, max_size=3).map(tuple))
PLANS = st.builds(
    Plan,
    *(TEXT, TEXT, TEXT),
    *(st.lists(NODES, max_size=4).map(tuple), st.lists(CASTS, max_size=3).map(tuple)),
    *(TRAFFIC, st.lists(RECOMPOSED, max_size=3).map(tuple)),
    st.lists(COPIES, max_size=3).map(tuple),
)


@settings(max_examples=100)
@given(PLANS)
def test_json_and_back(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert plan.to_json().count("\n") > len(plan.nodes)  # a line for each entry, which a diff shows
    assert all(
        isinstance(n.decision.category, Category) and isinstance(n.placement.run, Precision) for n in again.nodes
    )
    assert [type(n.decision.source) for n in again.nodes] == [type(n.decision.source) for n in plan.nodes]
    assert pickle.loads(pickle.dumps(plan)) == plan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.softmax(self.layer(x), -1)
        return torch.special.i0(y) + torch.special.i0(x), i + 1


@pytest.fixture(scope="module")
def plan() -> Plan:
    inputs = (torch.randn(2, 8), torch.arange(3))
    return autocastfx.convert(Model().eval(), inputs, dtype=torch.bfloat16, check=False).plan


def test_what_a_plan_tells(plan: Plan) -> None:
    assert (plan.low, plan.device, plan.op_list) == ("bfloat16", "cpu", "bfloat16")
    linear = plan["linear"]
    assert (linear.op, linear.module, linear.captured, linear.dtype) == ("linear", "layer", "float32", "bfloat16")
    assert linear.decision.category is Category.ALLOW
    assert str(linear.decision.source).startswith("op_lists/base.yaml:")
    assert linear.placement.run is Precision.LOW
    assert plan["softmax"].placement.run is Precision.FLOAT32
    assert plan["softmax"].dtype == "float32"
    assert plan.unlisted == {"special_i0": 2}
    # i + 1 holds no float32 value, so it runs in no precision of ours
    assert plan.by_op() == {
        ("linear", "low"): 1,
        ("softmax", "float32"): 1,
        ("special_i0", "float32"): 2,
        ("add", "float32"): 1,
    }
    casts = {cast.name: cast for cast in plan.casts}
    assert casts["x_bfloat16"] == PlannedCast("x_bfloat16", "x", "bfloat16", ("linear",), bytes=16 * 6)
    assert plan["softmax"].placement.as_stored == ("self",)  # it is asked for float32, and reads the product as it is
    assert Plan.from_json(plan.to_json()) == plan


def test_a_predicted_error_says_how_many_nodes_in_16_bits_it_leaves_out(plan: Plan) -> None:
    def measured(*unmeasured: str) -> Plan:
        nodes = (replace(n, error=None if n.name in unmeasured else 1e-3) for n in plan.nodes)
        return replace(plan, nodes=tuple(nodes), error=1e-3)

    assert (plan.low_unmeasured, plan.error_in_words) == (0, "")
    assert (measured().low_unmeasured, measured().error_in_words) == (0, "1.0e-03")
    assert measured("softmax").low_unmeasured == 0  # it is in float32
    assert measured("linear", "softmax").error_in_words == "1.0e-03, without 1 nodes in bfloat16 that were not measured"


def test_json_is_readable(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert list(data) == [
        "version",
        "low",
        "device",
        "op_list",
        "nodes",
        "casts",
        "traffic",
        "recomposed",
        "copies",
    ]
    node = next(n for n in data["nodes"] if n["name"] == "linear")
    assert node["decision"]["category"] == "allow"
    assert node["decision"]["source"] == str(plan["linear"].decision.source)
    assert node["placement"] == {"run": "low", "store": "low", "because": "allow", "as_stored": []}


def test_plans_from_before_they_had_a_version_are_read_and_later_ones_refused(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps({**data, "version": 2}).replace('"version": 2, ', "")) == plan
    for version in (2, "1", None):
        with pytest.raises(
            ValueError, match=rf"^this plan has version {version!r}, and this autocastfx reads version 1: "
        ):
            Plan.from_json(json.dumps({**data, "version": version}))


def test_unknown_node(plan: Plan) -> None:
    with pytest.raises(KeyError, match="the plan has no node 'linaer'"):
        plan["linaer"]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("special_i0_1", ["special_i0_1"]),
        ("special_i0", ["special_i0", "special_i0_1"]),
        ("layer", ["linear"]),
        ("l*r", ["linear"]),
        ("layer.linear", ["linear"]),
    ],
)
def test_nodes_are_selected_by_node_op_module_or_op_in_a_module(plan: Plan, what: str, names: list[str]) -> None:
    assert [node.name for node in select(plan, what)] == names


@pytest.mark.parametrize("known", ["scores", "softmax", "layer", "layer.linear"])
def test_where_nothing_is_selected_the_nearest_name_is_said(plan: Plan, known: str) -> None:
    nodes = tuple(replace(node, name="scores") if node.op == "softmax" else node for node in plan.nodes)
    wrong = known[:-2] + known[-1]
    said = f"no node, op or module of the plan is called {wrong!r} (did you mean {known!r}?)"
    with pytest.raises(KeyError, match=re.escape(said)):
        select(replace(plan, nodes=nodes), wrong)


GOOD = {"low": "float16", "device": "cpu", "op_list": "x", "nodes": [], "casts": [], "traffic": {}}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="no JSON"),
        pytest.param("null", id="null"),
        pytest.param("[]", id="list"),
        pytest.param("{}", id="no keys"),
        pytest.param(json.dumps({**GOOD, "extra": 1}), id="a key more"),
        pytest.param(json.dumps({**GOOD, "nodes": [{}]}), id="empty node"),
        pytest.param(json.dumps({**GOOD, "nodes": 3}), id="nodes are no list"),
        pytest.param(json.dumps({**GOOD, "casts": [{"name": "x"}]}), id="half a cast"),
        pytest.param(json.dumps({**GOOD, "recomposed": [{"node": "x"}]}), id="half a recomposed node"),
        pytest.param(json.dumps({**GOOD, "copies": [{"name": "x"}]}), id="half a copy"),
        pytest.param(json.dumps({k: v for k, v in GOOD.items() if k != "low"}), id="a key less"),
    ],
)
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a plan|Expecting"):
        Plan.from_json(text)


def test_a_plan_with_an_unknown_word_is_no_plan(plan: Plan) -> None:
    for known, unknown in (('"allow"', '"alow"'), ('"low"', '"lwo"')):
        with pytest.raises(ValueError, match=r"not a plan|is not a valid|is no cause"):
            Plan.from_json(plan.to_json().replace(known, unknown))
    assert Plan.from_json(json.dumps(GOOD)).nodes == ()
