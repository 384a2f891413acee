"""What objects look like as the last value of a notebook's cell: short, and no markup out of names."""

from __future__ import annotations

import pickle
from html.parser import HTMLParser
from typing import Any

import torch

import autocastfx
from autocastfx.graph.cell import preformatted, table
from autocastfx.report.explain import Explanation
from tests.decided import decided
from tests.golden.models import CASES, converted

EVIL = "<script>alert('x')</script>"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(value: Any) -> str:
    """The text of the value's HTML, which has no other tags than those of text and tables."""
    html = Tags(value._repr_html_())
    assert html.tags <= {"p", "br", "pre", "table", "tr", "th", "td"}
    assert len(value._repr_html_()) < 10_000
    return html.text


def test_nothing_of_a_text_is_markup() -> None:
    assert Tags(preformatted(EVIL)).tags == {"pre"}
    html = table([EVIL], [("node", EVIL), (EVIL, "a"), ("b", "c"), ("d", "e")], most=1, below=EVIL)
    assert Tags(html).tags == {"p", "table", "tr", "th", "td"}
    assert f"2 more rows: {EVIL}" in Tags(html).text
    assert table(["a", "b"], [], most=1, below="") == "<p>a<br>b</p>"


def test_the_difference_of_plans() -> None:
    amp_model = converted("cnn")
    other = autocastfx.OpList.of({"deny": ["conv2d"]}, name=EVIL)
    again = decided(amp_model._original.model, torch.randn(2, 3, 8, 8), op_list=["default", other])  # pyright: ignore[reportArgumentType]
    difference = autocastfx.diff(amp_model.plan, again.plan)
    assert difference
    text = shown(difference)
    assert all(line in text for line in difference.summary)
    assert difference.changed[0].name in text
    assert EVIL in text
    assert "nodes moved: none" in shown(autocastfx.diff(amp_model.plan, amp_model.plan))


def test_an_op_list() -> None:
    mine = autocastfx.OpList.of({"deny": ["exp", "log"], "allow": ["mm"], "unlisted": "deny"}, name=EVIL)
    assert repr(mine) == f"OpList({EVIL!r}, 3 rules: 1 allow, 2 deny)"
    text = shown(mine)
    assert EVIL in text
    assert "unlisted: deny" in text
    assert "exp, log" in text
    assert " more" in shown(autocastfx.load_op_list("bfloat16"))
    assert repr(autocastfx.OpList()) == "OpList('unnamed', 0 rules)"


def test_an_explanation_is_a_text_too() -> None:
    said = autocastfx.explain(converted("cnn"), "conv2d")
    assert isinstance(said, str)
    assert said == str(said)
    assert repr(said) == repr(str(said))
    assert said.splitlines()[0] in shown(said)
    assert type(pickle.loads(pickle.dumps(said))) is Explanation

    class Printer:
        def text(self, text: str) -> None:
            self.printed = text

    printer = Printer()
    said._repr_pretty_(printer, cycle=False)
    assert printer.printed == said
    assert shown(Explanation(EVIL)) == EVIL


def test_a_comparison() -> None:
    amp_model = CASES["cnn"]()
    compared = autocastfx.compare(None, amp_model, torch.randn(2, 3, 8, 8))
    assert str(compared) == compared.table()
    assert repr(compared).startswith("Comparison(")
    assert "compared with float32: finite, the largest error " in repr(compared)
    assert len(repr(compared)) < 500
    assert compared.table(10) in shown(compared)
    assert shown(autocastfx.Comparison((), 0, (), (), None, compared.variant)).endswith(" float32: finite")
