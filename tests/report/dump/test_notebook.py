"""The page in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import autocastfx
from tests.browser import Browser, needs_browser
from tests.golden.models import CASES, converted


class Frames(HTMLParser):
    """The attributes of frames."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "iframe"
        self.found.append(dict(attrs))


def test_a_cell_shows_the_page_in_a_frame_of_its_own() -> None:
    amp_model = converted("cnn")
    (frame,) = Frames(autocastfx.show(amp_model, height=500)._repr_html_()).found
    assert frame["srcdoc"] == autocastfx.dump(amp_model, format="html")
    assert frame["height"] == "500"
    assert frame["sandbox"] == "allow-scripts allow-downloads allow-forms"


def test_it_takes_what_dump_takes() -> None:
    amp_model = CASES["cnn"]()
    compared = autocastfx.compare(None, amp_model, torch.randn(2, 3, 8, 8))
    page = autocastfx.show(amp_model, comparison=compared, against=amp_model.plan)
    assert page.text == autocastfx.dump(amp_model, format="html", comparison=compared, against=amp_model.plan)
    assert repr(page) == "Page(height=700)"
    with pytest.raises(TypeError, match="dump shows what convert"):
        autocastfx.show(torch.nn.Linear(2, 2))


@needs_browser
def test_it_works_inside_a_frame(page: Browser, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    cell = autocastfx.show(converted("encoder_layer"))._repr_html_()
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><link rel='icon' href='data:,'>{cell}", encoding="utf-8")
    page.driver.get(path.as_uri())
    page.driver.switch_to.frame(0)
    page.wait(lambda: page.count("#view .box") > 3)

    def found() -> bool:
        """Keys go astray until the frame, which is a process of its own, has the focus."""
        page.run("document.getElementById('query').value = ''")
        page.click("#query")
        page.press("op:gelu")
        return page.text("#hits") == "1 found"

    page.wait(found)
    page.press("\ue007")
    assert page.text("#panel h2") == "gelu"
    page.click(".copy")
    page.wait(lambda: page.text(".copy") != "Copy")
    page.driver.switch_to.default_content()
    assert page.driver.current_url == path.as_uri()
