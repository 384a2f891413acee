"""How much of a graph runs in 16 bits and why the rest does not, as the page's first screen says it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of, views_of
from autocastfx.report.headline import Float32Reason, headline, percent
from autocastfx.report.html import page_data
from tests.browser import Browser, needs_browser
from tests.golden.models import CASES, converted
from tests.report.html.test_page_view import Tower, overflowing
from tests.report.shown import Shown, as_written

Show = Callable[..., Shown]
VISIBLE = """
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), said = [];
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const box = range.getBoundingClientRect();
  const inside = box.width && box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
  const around = node.parentElement;
  if (inside && around.checkVisibility() && !around.closest("script, style, option")) said.push(node.data);
}
return said.join(" ");
"""


@pytest.fixture(scope="module")
def tower() -> autocastfx.AmpModule:
    return as_written(Tower().eval(), torch.ones(4, 8))


def test_computing_ops_are_counted_and_views_and_labels_are_not() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.table = nn.Linear(8, 4), nn.LayerNorm(4), nn.Embedding(5, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.up(self.table((ids + 1) * 2 - 2)).transpose(0, 1)
            return self.norm(x.reshape(3, 2, 4)).double().float()

    amp_model = autocastfx.convert(Flat().eval(), (torch.ones(2, 3, dtype=torch.int64),), dtype=torch.bfloat16)
    found = headline(view_of(amp_model))
    told = {one.ops: one.count for one in found.reasons}
    assert found.low >= 1
    assert told[("embedding",)] == told[("layer_norm",)] == 1
    assert found.low + found.float32 <= 4  # reshape may copy
    assert found.flops == found.flops_low == 2 * 2 * 3 * 8 * 4


def test_the_most_frequent_reason_is_first(tower: autocastfx.AmpModule) -> None:
    found = headline(view_of(tower))
    assert found.reasons[0].count == max(one.count for one in found.reasons)
    assert sum(one.count for one in found.reasons) == found.float32
    assert Float32Reason("norms divide by a sum of squares", 7, ("layer_norm",)) in found.reasons
    assert Float32Reason("comes after layer_norm, which is float32", 6, ("add",)) in found.reasons


def test_products_in_float32_are_not_of_the_16_bit_flops() -> None:
    mine = autocastfx.OpList.of({"modules": [{"path": "1", "category": "float32"}]}, name="mine")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 24))
    amp_model = autocastfx.convert(model, (torch.ones(2, 8),), dtype="float16", op_list=["default", mine])
    found = headline(view_of(amp_model))
    assert (found.flops_low, found.flops) == (2 * 2 * 8 * 8, 2 * 2 * 8 * (8 + 24))
    assert found.says == "50 % of ops in float16"
    assert found.details == "1 of 2 computing ops, 25 % of matrix FLOPs"


def test_float8_is_told() -> None:
    assert "4 of them partly in float8" in headline(view_of(converted("float8"))).details


@pytest.mark.parametrize(
    ("part", "of", "said"), [(0, 3, "0 %"), (1, 1000, "1 %"), (999, 1000, "99 %"), (3, 3, "100 %"), (2, 3, "67 %")]
)
def test_none_and_all_are_said_of_none_and_all_alone(part: int, of: int, said: str) -> None:
    assert percent(part, of) == said


def test_a_graph_that_computes_nothing_says_so() -> None:
    view = view_of(converted("cnn"))
    assert headline(replace(view, rows=())).says == "No op computes floating-point values"


@pytest.mark.parametrize("name", CASES)
def test_each_op_in_float32_has_a_reason_that_the_page_knows(name: str) -> None:
    variant = page_data([view_of(converted(name))], 0)["variants"][0]
    told = [node for node in variant["nodes"] if node.get("shade") == "float32" and node["kind"] == "op"]
    assert all(variant["whys"][node["why"] - 1] for node in told)
    assert {one["says"] for one in variant["headline"].get("reasons", ())} <= {*variant["whys"]}


def test_graphs_are_told_apart_by_mode_inputs_and_device() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.drop(x))

    model = Two()
    autocastfx.enable(model, dtype="bfloat16")
    model(torch.ones(2, 8))
    model.eval()(torch.ones(2, 8))
    views, _ = views_of(model, "dump shows")
    assert views[0].title == "graph 1 of 2, train mode, x=float32[2, 8], cpu"
    assert views[1].title.startswith("graph 2 of 2, ")
    assert views[1].title.endswith("=float32[2, 8], cpu")
    assert view_of(converted("cnn")).title.endswith(" mode, images=float32[2, 3, 8, 8], cpu")


@needs_browser
def test_the_first_screen_says_how_much_runs_in_16_bits_and_why_the_rest_does_not(
    page: Browser, shown: Show, tower: autocastfx.AmpModule
) -> None:
    page.viewport(1280, 887)
    try:
        page.open(shown(tower).path)
        seen = page.run(VISIBLE)
    finally:
        page.whole_window()
    ops = [n for n in tower.plan.nodes if n.op in ("linear", "relu", "add", "tanh", "layer_norm")]
    low = sum(str(node.placement.run) == "low" for node in ops)
    share = re.search(r"(\d+) % of ops in bfloat16", seen)
    assert share is not None
    assert int(share[1]) == round(100 * low / len(ops))
    reasons = re.search(r"Most frequent reasons for float32 (\d+) (.*)", seen)
    assert reasons is not None
    assert int(reasons[1]) == 7
    assert reasons[2].startswith("layer_norm: norms divide by a sum of squares")


@needs_browser
def test_a_reason_leads_to_its_ops_and_each_op_has_one_in_the_table(
    page: Browser, shown: Show, tower: autocastfx.AmpModule
) -> None:
    page.open(shown(tower).path)
    page.click("#reasons li:first-child .link")
    assert page.text("#hits") == "1 of 7"
    assert page.text("#panel h2") == "layer_norm"
    page.click("#tab-ops")
    titles = page.run("return [...document.querySelectorAll('#panel thead th')].map((cell) => cell.innerText)")
    assert titles[:4] == ["op", "bf16", "f32", "why"]
    rows = page.run(
        "return [...document.querySelectorAll('#panel tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    why = {row[0]: row[3] for row in rows if len(row) == 4}
    assert why["layer_norm"] == "norms divide by a sum of squares"
    assert why["linear"].startswith("matrix products run on tensor cores")


@needs_browser
def test_a_failed_comparison_opens_in_the_colours_of_errors(page: Browser, shown: Show) -> None:
    page.colours("light")
    amp_model, compared = overflowing()
    page.open(shown(amp_model, comparison=compared).path)
    assert page.run("return document.getElementById('colour').value") == "error"
    lost = page.count(".box.lost")
    assert lost > 0
    assert page.count(".box.selected.lost") == 1
    page.choose("#colour", "precision")  # what became Inf is told in every colour
    assert page.count(".box.lost") == lost
    fill = page.run("return getComputedStyle(document.querySelector('.box.lost .area')).fill")
    assert fill == "rgb(243, 182, 214)"


class Labelled(nn.Module):
    """A loss whose labels are shifted and masked."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = torch.where(labels == 3, -100, labels.roll(-1, 1))
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), shifted.flatten())


@needs_browser
def test_labels_and_masks_are_left_out_until_asked_for(page: Browser, shown: Show) -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    page.open(shown(labelled(ids)).path)
    names = "return [...document.querySelectorAll('#view .box .title')].map((t) => t.textContent)"
    before = page.run(names)
    assert "cross_entropy" in " ".join(before)
    assert not {"roll", "where", "eq"} & set(before)
    edge = "return [...document.querySelectorAll('.edge title')].some((t) => t.textContent.startsWith('labels'))"
    assert page.run(edge), "the labels lead to the loss"
    page.click("#integers")
    assert {"roll", "where", "eq"} <= set(page.run(names))
    page.click("#integers")
    page.search("op:roll")  # what is left out is found all the same
    assert page.text("#panel h2") == "roll"
    assert page.run("return document.getElementById('integers').checked")


def labelled(ids: torch.Tensor) -> autocastfx.AmpModule:
    return autocastfx.convert(Labelled().eval(), (ids, ids), dtype=torch.bfloat16)


@needs_browser
def test_casts_of_equal_layers_are_one_row(page: Browser, shown: Show, tower: autocastfx.AmpModule) -> None:
    page.open(shown(tower).path)
    page.click("#tab-casts")
    rows = page.run("return [...document.querySelectorAll('#panel tbody tr')].map((row) => row.innerText)")
    assert any(re.match(r"layers\.\*\.down\.bias \u00d77\s+f32 → bf16", row) for row in rows)
    assert f"{len(tower.plan.casts)} casts" in page.text("#panel .none")
    page.run(
        "[...document.querySelectorAll('#panel tbody .link')].find((b) => b.textContent.includes('down.bias')).click()"
    )
    assert "layers.0.down" in page.text("#panel") or "layers_0_down" in page.text("#panel")


@needs_browser
@pytest.mark.parametrize("size", [(1280, 887), (1920, 1080)])
def test_nothing_lies_over_the_graph(
    page: Browser, shown: Show, tower: autocastfx.AmpModule, size: tuple[int, int]
) -> None:
    page.viewport(*size)
    try:
        page.open(shown(tower).path)
        page.click("#folds")
        for _ in range(4):
            page.click("#closer")  # so that the map is needed
        over = page.run(
            "const g = document.getElementById('graph').getBoundingClientRect();"
            "return [...document.querySelectorAll('button, #map, #legend')].filter((one) => {"
            "const b = one.getBoundingClientRect();"
            "return b.width && b.left < g.right && b.right > g.left && b.top < g.bottom && b.bottom > g.top; })"
            ".map((one) => one.id)"
        )
        assert over == []
        assert page.driver.find_element("css selector", "#map").is_displayed()
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        page.whole_window()
