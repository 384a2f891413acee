"""A page that tells how another plan decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of
from autocastfx.report.html import page_data
from tests.browser import Browser, needs_browser
from tests.golden.models import converted
from tests.report.html.test_page_view import Tower
from tests.report.shown import Shown

MINE = autocastfx.OpList.of({"deny": ["relu"], "modules": [{"path": "layers.4", "category": "float32"}]}, name="mine")


def two_ways() -> tuple[autocastfx.AmpModule, autocastfx.AmpModule]:
    model = Tower().eval()
    first = autocastfx.convert(model, (torch.ones(4, 8),), dtype="float16")
    return first, autocastfx.convert(model, (torch.ones(4, 8),), op_list=["default", MINE], dtype="float16")


@pytest.fixture(scope="module")
def ways() -> tuple[autocastfx.AmpModule, autocastfx.AmpModule]:
    return two_ways()


def test_nodes_that_differ_hold_both_decisions(ways: tuple[autocastfx.AmpModule, autocastfx.AmpModule]) -> None:
    before, after = ways
    found = autocastfx.diff(before.plan, after.plan)
    variant = page_data([view_of(after)], 0, against=before.plan)["variants"][0]
    told = {node["name"]: node["before"] for node in variant["nodes"] if "before" in node}
    assert told.keys() == {pair.name for pair in found.changed}
    assert {name for name, said in told.items() if said.get("moved")} == {p.name for p in found.changed if p.moved}
    relu = next(name for name in told if name.startswith("relu"))
    assert told[relu]["decided"] == str(before.plan[relu].decision)
    assert told[relu]["runs"] == str(before.plan[relu].placement.run)
    assert variant["changes"] == {"summary": str(found).splitlines()[:3]}


class One(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ x.mT)


class Other(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ x.mT)


def test_nodes_of_one_plan_alone_are_told() -> None:
    one, other = (autocastfx.convert(model.eval(), (torch.ones(2, 8),), dtype="float16") for model in (One(), Other()))
    variant = page_data([view_of(other)], 0, against=one.plan)["variants"][0]
    assert [n["before"] for n in variant["nodes"] if n.get("op") == "sigmoid"] == [{"added": True}]
    assert [n["name"] for n in variant["changes"]["removed"]] == ["tanh"]


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="the plan given as against= is of another model or graph: no node of it"):
        autocastfx.dump(
            converted("cnn"),
            format="html",
            against=autocastfx.convert(nn.Tanh(), (torch.ones(2),), dtype="float16").plan,
        )


def test_only_a_plan_and_only_on_the_page() -> None:
    amp_model: Any = converted("cnn")
    with pytest.raises(TypeError, match=r"against= takes a plan, such as the other model's \.plan, not a "):
        autocastfx.dump(amp_model, format="html", against=amp_model)
    with pytest.raises(ValueError, match=r"against= goes into format='html', not 'text': print autocastfx\.diff"):
        autocastfx.dump(amp_model, against=amp_model.plan)


@needs_browser
def test_changes_are_marked_listed_and_found(
    page: Browser, shown: Callable[..., Shown], ways: tuple[autocastfx.AmpModule, autocastfx.AmpModule]
) -> None:
    before, after = ways
    found = autocastfx.diff(before.plan, after.plan)
    page.open(shown(after, against=before.plan).path)
    page.click("#tab-changes")
    assert page.count("#panel tbody tr") == len(found.changed)
    page.click("#panel tbody tr button")
    moved = found.changed[0]
    assert page.text("#panel h2") == moved.name
    assert str(moved.before.decision) in page.text("[aria-label='In the other plan']")
    assert moved.after.decision.reason in page.text(".why")
    assert f"Δ {moved.before.placement.run} → {moved.after.placement.run}" in page.text(".box.selected")
    page.search("is:changed")
    assert page.text("#hits") == f"1 of {len(found.changed)}"
    assert page.count(".box.faded") == 0
    page.click("#changes")
    of_each = "(b) => [b.textContent.includes('Δ'), b.classList.contains('faded')]"
    states = page.run(f"return [...document.querySelectorAll('.box')].map({of_each})")
    assert {marked != is_faded for marked, is_faded in states} == {True}
    assert len({marked for marked, _ in states}) == 2


@needs_browser
def test_without_another_plan_there_are_no_changes(page: Browser, shown: Callable[..., Shown]) -> None:
    page.open(shown(converted("cnn")).path)
    assert page.count("#tab-changes") == 0
    assert not page.driver.find_element("css selector", "#changes-choice").is_displayed()
