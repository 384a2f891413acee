"""What can be chosen on the page: folding, colours, layout, pictures, links."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of
from tests.browser import Browser, needs_browser
from tests.golden.models import CASES, converted
from tests.report.shown import Shown, as_written

pytestmark = needs_browser
Show = Callable[..., Shown]


class Block(nn.Module):
    def __init__(self, *, wide: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, wide), nn.Linear(wide, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Tower(nn.Module):
    """Four equal layers, one with another width, and two equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)), Block(wide=32), Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.tanh(x))


@pytest.fixture(scope="module")
def tower() -> autocastfx.AmpModule:
    return as_written(Tower().eval(), torch.ones(4, 8))


def labels(page: Browser) -> list[str]:
    """The titles of closed modules and folded layers."""
    return page.run("return [...document.querySelectorAll('.box.group .title')].map((t) => t.textContent.slice(2))")


def boxes(page: Browser) -> dict[str, list[float]]:
    """Where boxes are on the screen."""
    found = "[...document.querySelectorAll('#view .box')].map((b) => [b.dataset.key, b.getBoundingClientRect()])"
    return page.run(f"return Object.fromEntries({found}.map(([k, r]) => [k, [r.left, r.top, r.right, r.bottom]]))")


def test_equal_layers_are_one_box_that_opens(page: Browser, shown: Show, tower: autocastfx.AmpModule) -> None:
    page.open(shown(tower).path)
    assert labels(page) == ["layers.0 … 3 \u00d74", "layers.5 … 6 \u00d72"]
    page.click("[aria-label^='4 equal layers layers.0 … 3, closed']")
    assert "4 with the same operations, decisions and shapes" in page.text("#panel")
    assert labels(page) == [*(f"layers.{i}" for i in range(4)), "layers.5 … 6 \u00d72"]
    page.click("[aria-label^='4 equal layers layers.0 … 3, open']")
    assert labels(page)[0] == "layers.0 … 3 \u00d74"


def test_folding_can_be_switched_off_and_keeps_what_is_selected(
    page: Browser, shown: Show, tower: autocastfx.AmpModule
) -> None:
    page.open(shown(tower).path)
    page.search("op:relu layers.2")
    name = page.text("#panel h2")
    page.click("#folds")
    assert page.text("#panel h2") == name
    assert page.count(".box.selected[aria-pressed=true]") == 1
    assert page.count("[aria-label*='equal layers']") == 0
    page.click("#folds")
    assert page.text("#panel h2") == name
    assert page.count("[aria-label^='4 equal layers layers.0 … 3, open']") == 1


def test_layers_that_are_decided_otherwise_are_not_folded(page: Browser, shown: Show) -> None:
    rule = {"modules": [{"path": "layers.1", "category": "float32", "ops": ["linear"]}]}
    mine = autocastfx.OpList.of(rule, name="mine")
    amp_model = autocastfx.convert(Tower().eval(), (torch.ones(4, 8),), op_list=["default", mine], dtype="float16")
    page.open(shown(amp_model).path)
    assert not any(label.startswith("layers.0 …") for label in labels(page))
    assert "layers.2 … 3 \u00d72" in labels(page)


def test_shapes_stand_in_boxes_and_on_lines_out_of_closed_modules(
    page: Browser, shown: Show, tower: autocastfx.AmpModule
) -> None:
    page.open(shown(tower).path)
    assert "[4, 8] 128 B" in page.text("[aria-label^='input']")
    assert page.run("return [...document.querySelectorAll('.mark text')].some((t) => t.textContent === '[4, 8]')")
    assert "[4, 8] 128 B" in page.text(".edge title")
    page.click("#shapes")
    assert (
        page.run("return [...document.querySelectorAll('#view text')].some((t) => t.textContent.includes('[4, 8]'))")
        is False
    )
    page.search("op:linear layers.4.up")
    shown_facts = page.text("#panel dl")
    assert "shape[4, 32]may differ[s0=4, 32]" in shown_facts
    assert "256 B" in shown_facts
    page.run("document.querySelector('.mark').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    assert "[4, 8]" in page.text("#panel ul:last-of-type")


def test_attributes_are_told(page: Browser, shown: Show) -> None:
    page.open(shown(converted("encoder_layer")).path)
    page.search("op:softmax")
    assert page.text("[aria-label=Attributes] dl") == "dim-1"
    page.search("op:layer_norm")
    assert "eps1e-05" in page.text("[aria-label=Attributes] dl")


def test_the_head_tells_of_the_model(page: Browser, shown: Show, tower: autocastfx.AmpModule) -> None:
    page.open(shown(tower).path)
    assert page.text("h1") == "Tower"
    facts = page.run("return [...document.querySelectorAll('#facts li')].map((li) => li.textContent)")
    count = sum(p.numel() for p in tower.parameters())
    assert facts == [
        f"parameters {count:,}",
        "device cpu",
        "dtype bfloat16",
        f"op list {tower.plan.op_list}",
        "fold exact",
        "made 2026-01-01 00:00 UTC",
        f"autocastfx {autocastfx.__version__}",
        f"torch {torch.__version__}",
    ]


def test_boxes_take_the_colour_of_their_bytes(page: Browser, shown: Show, tower: autocastfx.AmpModule) -> None:
    page.open(shown(tower).path)
    page.click("#folds")
    page.choose("#colour", "bytes")
    level = "return [...document.querySelectorAll('.box')].filter((b) => b.classList.contains('heat4')).length"
    assert page.run(level) > 0
    largest = max(row.bytes for row in view_of(tower).rows if row.kind == "op")
    assert largest < 1000
    assert f"to {largest} B" in page.text("#legend")
    assert page.count("#colour option[value=error]:disabled") == 1
    fill = "return getComputedStyle(document.querySelector('.box.heat4 .area')).fill"
    assert page.run(fill) != page.run(fill.replace("heat4", "heat0"))
    colour = "return getComputedStyle(document.querySelector('.box[class*=heat] {}')).fill"
    assert page.run(colour.format(".castword")) == page.run(colour.format(".title"))
    page.choose("#colour", "precision")
    assert page.count(".box.heat4") == 0


def test_boxes_take_the_colour_of_their_errors(page: Browser, shown: Show) -> None:
    model, x = Tower().eval(), torch.randn(4, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    compared = autocastfx.compare(model, amp_model, x)
    page.open(shown(amp_model, comparison=compared).path)
    page.choose("#colour", "error")
    worst = compared.worst
    assert worst is not None
    page.search(f"{worst.name}")
    level = sum(worst.error > bound for bound in (1e-4, 1e-3, 1e-2, 1e-1))
    assert page.count(f".box.selected.heat{level}") == 1
    assert "error to 1 %" in page.text("#legend")


def overflowing() -> tuple[autocastfx.AmpModule, autocastfx.Comparison]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Block() for _ in range(12)))
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x))

    torch.manual_seed(0)
    model, x = Deep().eval(), torch.randn(2, 8)
    with torch.no_grad():
        model.layers[3].up.weight.mul_(1.5e5)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.float16)
    return amp_model, autocastfx.compare(model, amp_model, x)


def test_a_page_of_a_comparison_that_failed_opens_where_it_begins(page: Browser, shown: Show) -> None:
    amp_model, compared = overflowing()
    first = compared.first_non_finite
    assert first is not None
    path = shown(amp_model, comparison=compared).path
    page.open(path)
    assert (
        page.text("#banner span") == f"Inf and NaN begin at {first.name} ({first.op}) in module {first.module}. Show it"
    )
    assert page.text("#panel h2") == first.name
    assert page.count(".box.selected[aria-pressed=true]") == 1
    assert f"Inf or NaN: {first.overflow:.2%}".replace("%", " %") in page.text(".box.selected")
    page.search("op:layer_norm")
    page.click("#banner .link")
    assert page.text("#panel h2") == first.name
    page.choose("#colour", "error")
    assert page.count(".box.selected.lost") == 1
    page.click("#banner > button")
    assert not page.driver.find_element("css selector", "#banner").is_displayed()


def test_a_page_without_a_failure_has_no_banner(page: Browser, shown: Show) -> None:
    amp_model = CASES["cnn"]()
    page.open(shown(amp_model, comparison=autocastfx.compare(None, amp_model, torch.randn(2, 3, 8, 8))).path)
    assert not page.driver.find_element("css selector", "#banner").is_displayed()
    page.click("#tab-errors")
    assert page.text("#panel p").startswith("The error begins at ")


def test_the_list_that_changes_a_node_can_be_copied(page: Browser, shown: Show) -> None:
    page.open(shown(converted("encoder_layer")).path)
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.search("op:gelu")
    wanted = 'modules:\n  - {path: "mlp.1", category: float32, ops: [gelu]}\n'
    assert page.text("pre.yaml") == wanted
    page.click(".copy")
    page.wait(lambda: page.text(".copy") == "Copied")
    assert page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == wanted


@pytest.mark.parametrize("clipboard", ["undefined", "{ writeText: () => Promise.reject(new Error('no')) }"])
def test_without_a_clipboard_the_list_is_selected(page: Browser, shown: Show, clipboard: str) -> None:
    page.open(shown(converted("encoder_layer")).path)
    page.run(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard}, configurable: true }})")
    page.search("op:gelu")
    page.click(".copy")
    page.wait(lambda: page.text(".copy") == "Selected: copy it now")
    assert page.run("return getSelection().toString()").strip() == page.text("pre.yaml").strip()


def test_from_left_to_right(page: Browser, shown: Show, tower: autocastfx.AmpModule) -> None:
    page.open(shown(tower).path)
    down = boxes(page)
    page.choose("#direction", "LR")
    right = boxes(page)
    assert down.keys() == right.keys()
    first, last = min(down, key=lambda key: down[key][1]), max(down, key=lambda key: down[key][3])
    assert right[first][2] < right[last][0]
    apart = sorted(right.values())
    assert all(one[2] <= other[0] or one[3] <= other[1] or other[3] <= one[1] for one, other in pairwise(apart))


def test_the_map_shows_where_one_is_and_leads_elsewhere(
    page: Browser, shown: Show, tower: autocastfx.AmpModule
) -> None:
    page.open(shown(tower).path)
    page.press("0")
    assert not page.driver.find_element("css selector", "#map").is_displayed()
    page.click("#folds")
    for _ in range(4):
        page.click("#closer")
    assert page.driver.find_element("css selector", "#map").is_displayed()
    assert page.count("#map .spot:not(.frame)") == page.count("#view .box")
    seen = "return Number(document.querySelector('#map .seen').getAttribute('y'))"
    before = page.run(seen)
    where = page.run(
        "const b = document.getElementById('map').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    press: dict[str, Any] = {
        "x": where[0] + where[2] / 2,
        "y": where[1] + where[3] - 3,
        "button": "left",
        "clickCount": 1,
    }
    for kind in ("mousePressed", "mouseReleased"):
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **press})
    assert page.run(seen) > before


def test_the_drawing_can_be_saved_as_svg(
    page: Browser, shown: Show, tower: autocastfx.AmpModule, tmp_path: Path
) -> None:
    page.open(shown(tower).path)
    page.downloads(tmp_path)
    page.click("#svg")
    page.wait(lambda: (tmp_path / "Tower.svg").exists())
    text = (tmp_path / "Tower.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    said = {one.text for one in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"▸ layers.0 … 3 \u00d74", "input", "output"} <= said
    assert "var(" not in text
    assert "light-dark" not in text
    assert "tabindex" not in text


def pixels(png: bytes) -> bytes:
    """The unpacked rows of a PNG file."""
    at, packed = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        packed += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return zlib.decompress(packed)


def test_the_drawing_can_be_saved_as_png(
    page: Browser, shown: Show, tower: autocastfx.AmpModule, tmp_path: Path
) -> None:
    page.open(shown(tower).path)
    page.downloads(tmp_path)
    wide, high = page.run("const b = document.getElementById('view').getBBox(); return [b.width, b.height]")
    page.click("#png")
    page.wait(lambda: (tmp_path / "Tower.png").exists())
    found = (tmp_path / "Tower.png").read_bytes()
    assert found.startswith(b"\x89PNG")
    size = struct.unpack(">II", found[16:24])
    assert size[0] >= 2 * wide
    assert size[1] >= 2 * high
    assert len(set(pixels(found))) > 50  # it is not blank


def test_the_address_leads_to_the_node_again(page: Browser, shown: Show, tower: autocastfx.AmpModule) -> None:
    path = shown(tower).path
    page.open(path)
    page.search("op:relu layers.2")
    name, address = page.text("#panel h2"), page.driver.current_url
    assert address.endswith(f"#variant=0&node={name}")
    page.driver.get("about:blank")
    page.driver.get(address)
    page.wait(lambda: page.count(".box.selected[aria-pressed=true]") == 1)
    assert page.text("#panel h2") == name
    page.press("\ue00c")  # escape
    assert page.driver.current_url == path.as_uri()
    page.run("location.hash = arguments[0]", address.partition("#")[2])
    page.wait(lambda: page.text("#panel h2") == name)
    page.click("#reset")
    assert page.driver.current_url == path.as_uri()
    assert page.text("#panel h2") == "This model"


def test_an_address_of_a_node_that_is_not_there_opens_the_page(page: Browser, shown: Show) -> None:
    page.driver.get("about:blank")
    page.driver.get(f"{shown(converted('cnn')).path.as_uri()}#variant=7&node=gone")
    page.wait(lambda: page.count("#view .box") > 3)
    assert page.text("#panel h2") == "This model"
