"""Causes of placements are values; their texts are read back, and name the nodes of sub-graphs by their paths."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.plan.plan import Cause, Why, because_of
from autocastfx.policy.rule import Category

PACKAGE = Path(autocastfx.__file__).parent


@pytest.mark.parametrize("why", list(Why))
def test_the_text_of_every_cause_is_read_back(why: Why) -> None:
    cause = Cause(why, ("exp", "inner/mm_1")[: why.count("{}")])
    assert Cause.from_text(str(cause)) == cause


@pytest.mark.parametrize("text", ["", "after ", "after exp twice", "between a", "fewest bytes", "{}"])
def test_other_text_is_no_cause(text: str) -> None:
    with pytest.raises(ValueError, match="is no cause of a placement"):
        Cause.from_text(text)


def test_no_two_causes_have_a_text_in_common() -> None:
    for why in Why:
        text = str(Cause(why, ("a", "b")[: why.count("{}")]))
        fitting = [w for w in Why if re.fullmatch(r"\S+".join(map(re.escape, w.value.split("{}"))), text)]
        assert fitting == [why]


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = torch.exp(self.layer(x)) + 1.0
        return self.layer(hidden)


def test_a_cause_in_a_sub_graph_names_a_node_of_the_plan() -> None:
    plan = autocastfx.convert(Guarded(), torch.randn(2, 8), dtype=torch.bfloat16, check=False).plan
    (add,) = [node for node in plan.nodes if node.op == "add"]
    assert add.name.count("/") == 1
    assert add.placement.because.why is Why.AFTER
    assert plan[add.placement.because.nodes[0]].op == "exp"


def test_explain_names_the_cause_in_a_sub_graph() -> None:
    amp_model = autocastfx.convert(Guarded(), torch.randn(2, 8), dtype=torch.bfloat16, check=False)
    assert "exp (exp) is deny" in autocastfx.explain(amp_model, "add").replace("submod_1/", "").replace(
        "wrap_body_0/", ""
    )


def test_no_text_of_a_reason_is_compared_or_split() -> None:
    wanted = re.compile(
        r"because\.(startswith|removeprefix|partition|split)|because\)?\s*(==|!=|in)\s*[\(\"']|startswith\(.after "
    )
    found = [path for path in PACKAGE.rglob("*.py") if wanted.search(path.read_text("utf-8"))]
    assert found == []
    assert [path.name for path in PACKAGE.rglob("*.py") if ".yaml:" in path.read_text("utf-8")] == []


CATEGORIES = {Why.ALLOW: "allow", Why.DENY: "deny", Why.KEEP: "keep", Why.PROMOTE: "promote"}


@pytest.mark.parametrize("why", CATEGORIES)
def test_a_category_that_decided_is_named_once(why: Why) -> None:
    (node, *_) = autocastfx.convert(nn.Linear(8, 8), torch.randn(2, 8), dtype=torch.bfloat16, check=False).plan.nodes
    decided = replace(
        node,
        decision=replace(node.decision, category=Category(CATEGORIES[why])),
        placement=replace(node.placement, because=Cause(why)),
    )
    assert because_of(decided).count(f"its category is {CATEGORIES[why]}") == 1
