"""The page as text: what is inside, what is escaped, and what it may load."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.report.html import SCRIPTS, asset
from tests.golden.models import CASES, INPUTS, converted
from tests.golden.readme import run
from tests.report.shown import in_both_modes, unpacked

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOSTILE = "</script><script>window.stolen = 1</script><!-- & \"'"


class Parsed(HTMLParser):
    """Tags with their attributes; the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.comments: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in self.texts else ""
        if self._inside:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]


def page(amp_model: autocastfx.AmpModule, **options: Any) -> str:
    return autocastfx.dump(amp_model, format="html", **options)


def data(text: str) -> dict[str, Any]:
    read = json.loads(Parsed(text).texts["script"][0])
    return {**read, "variants": [{**one, "nodes": unpacked(one["nodes"])} for one in read["variants"]]}


def hostile() -> autocastfx.AmpModule:
    """A model whose list says what would end the page's script."""
    rule = {"deny": [{"reason": HOSTILE, "ops": ["linear"]}]}
    mine = autocastfx.OpList.of(rule, name="mine")
    return autocastfx.convert(nn.Linear(8, 8), (torch.ones(2, 8),), op_list=["default", mine], dtype="float16")


def test_all_variants_are_there_and_the_present_one_is_shown_first() -> None:
    amp_model = in_both_modes(CASES["encoder_layer"](), *INPUTS["encoder_layer"])
    assert data(page(amp_model))["shown"] == 0
    shown = data(page(amp_model.eval()))
    assert shown["shown"] == 1
    assert [v["title"].split(",")[0] for v in shown["variants"]] == ["1 of 2", "2 of 2"]
    said = shown["variants"][1]["summary"]
    assert said == autocastfx.dump(amp_model, width=None).splitlines()[: len(said)]


def test_nothing_in_the_data_ends_its_script() -> None:
    text = page(hostile())
    parsed = Parsed(text)
    assert len(parsed.of("script")) == 1 + len(SCRIPTS)
    linear = next(n for n in data(text)["variants"][0]["nodes"] if n.get("op") == "linear")
    assert linear["reason"] == HOSTILE
    assert "<" not in parsed.texts["script"][0]


def test_the_policy_admits_the_scripts_and_styles_of_the_page_and_nothing_else() -> None:
    parsed = Parsed(page(converted("cnn")))
    policy = next(a["content"] for a in parsed.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(part.strip().split(" ", 1) for part in (policy or "").split(";"))
    assert rules["default-src"] == "'none'"
    scripts = [_hash(text) for text in parsed.texts["script"][1:]]
    assert rules["script-src"].split() == ["'wasm-unsafe-eval'", *scripts]
    assert rules["style-src"].split() == [_hash(text) for text in parsed.texts["style"]]
    assert rules["img-src"] == "data:"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_it_asks_for_no_other_file() -> None:
    for tag, attributes in Parsed(page(converted("cnn"))).tags:
        asked = [attributes[name] for name in ("src", "href", "data", "action", "srcset") if name in attributes]
        assert all(target == "data:," for target in asked), (tag, attributes)
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    own = "".join(asset(name) for name in (*SCRIPTS[1:], "page.css"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|innerHTML|eval\(", own)


def test_notices_of_third_parties_are_in_a_comment() -> None:
    (comment,) = Parsed(page(converted("cnn"))).comments
    for words in ("Michael Daines", "Eclipse Public License - v 1.0", "Expat maintainers", "Emscripten authors"):
        assert words in comment
    assert "viz-js/viz 3.31.0" in asset("viz-standalone.LICENSES.txt")
    assert asset("viz-standalone.js").startswith("/*!\nViz.js 3.31.0\n")


def test_no_place_of_the_template_is_left() -> None:
    text = page(converted("cnn"))
    for name in re.findall(r"\{\{\w+\}\}", asset("page.html")):
        assert name not in text


def test_the_library_survives_what_browsers_do_to_text() -> None:
    text = asset("viz-standalone.js")
    assert "\r" not in text
    assert "\0" not in text
    assert "</script" not in text.lower()
    assert "<!--" not in text


@pytest.mark.parametrize("name", CASES)
def test_twice_the_same(name: str) -> None:
    assert page(CASES[name]()) == page(converted(name))


def test_a_comparison_is_shown_in_the_variant_that_it_is_of_whatever_the_models_mode() -> None:
    amp_model = CASES["cnn"]()
    compared = autocastfx.compare(None, amp_model.eval(), torch.randn(2, 3, 8, 8), gradients=True)
    modes = [variant.mode for variant in amp_model._shown]
    shown = data(page(amp_model.train(), comparison=compared))
    assert shown["shown"] == modes.index("eval")
    measured = {n["name"]: n["numerics"] for n in shown["variants"][shown["shown"]]["nodes"] if "numerics" in n}
    assert {name: numbers["error"] for name, numbers in measured.items()} == {n.name: n.error for n in compared.nodes}
    gradients = {name: numbers["gradient"]["error"] for name, numbers in measured.items() if "gradient" in numbers}
    assert gradients == {n.name: n.gradient.error for n in compared.nodes if n.gradient is not None} != {}
    assert not any("numerics" in node for node in shown["variants"][modes.index("train")]["nodes"])


def test_numbers_of_two_sizes_do_not_meet() -> None:
    class Loop(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ x.mT) if x.shape[0] > 3 else torch.tanh(x @ x.mT)

    amp_model = autocastfx.convert(Loop().eval(), (torch.ones(2, 8),), dtype="float16")
    compared = autocastfx.compare(None, amp_model, torch.ones(5, 4))
    shown = data(page(amp_model, comparison=compared))
    counts = [sum("numerics" in node for node in variant["nodes"]) for variant in shown["variants"]]
    assert counts[shown["shown"]] == len(compared.nodes) == sum(counts)
    assert any(node["name"].startswith("relu") for node in shown["variants"][shown["shown"]]["nodes"])


def test_only_what_compare_returned_is_a_comparison() -> None:
    with pytest.raises(TypeError, match=r"comparison= takes what compare\(\) returned, not a dict"):
        autocastfx.dump(converted("cnn"), format="html", comparison={})  # pyright: ignore[reportArgumentType]


def test_only_the_page_takes_a_comparison() -> None:
    amp_model = CASES["cnn"]()
    with pytest.raises(ValueError, match="comparison= goes into format='html', not 'text': leave it away, or print it"):
        autocastfx.dump(amp_model, comparison=autocastfx.compare(None, amp_model, torch.randn(2, 3, 8, 8)))


def test_the_head_holds_what_is_known_of_the_model() -> None:
    amp_model = autocastfx.convert(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (torch.ones(2, 8),), fold="kernel", dtype="float16"
    )
    shown = data(page(amp_model))
    assert [edit["write"] for edit in shown["model"].pop("edits")] == ['weights="cached"', "allow: [layer_norm]"]
    assert shown["model"] == {
        "name": "Sequential",
        "parameters": 88,
        "fold": "kernel",
        "date": "2026-01-01 00:00 UTC",
        "autocastfx": autocastfx.__version__,
        "torch": torch.__version__,
    }
    variant = shown["variants"][0]
    assert (variant["device"], variant["low"], variant["op_list"]) == ("cpu", "float16", amp_model.plan.op_list)


def test_tied_parameters_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x))

    assert data(page(autocastfx.convert(Tied(), (torch.ones(2, 8),), dtype="float16")))["model"]["parameters"] == 64


@pytest.mark.parametrize("name", CASES)
def test_an_unpickled_model_gives_the_same_after_a_call(name: str) -> None:
    unpickled = pickle.loads(pickle.dumps(converted(name)))
    unpickled(*INPUTS[name])
    assert page(unpickled) == page(converted(name))


def test_an_enabled_model_has_a_head_too() -> None:
    model = nn.Linear(8, 4)
    autocastfx.enable(model, fold="kernel", dtype="float16")
    model(torch.ones(2, 8))
    found = data(autocastfx.dump(model, format="html"))["model"]
    assert (found["name"], found["parameters"], found["fold"]) == ("Linear", 36, "kernel")


def test_the_date_is_that_of_now_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    before = datetime.now(timezone.utc).replace(second=0, microsecond=0, tzinfo=None)
    made = datetime.strptime(data(page(converted("cnn")))["model"]["date"], "%Y-%m-%d %H:%M UTC")
    assert before <= made <= before + timedelta(minutes=5)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert data(page(converted("cnn")))["model"]["date"] == "1970-01-01 00:00 UTC"


@pytest.mark.parametrize("seconds", ["soon", "1e9", "9" * 30])
def test_a_date_that_is_no_number_is_refused(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
    with pytest.raises(
        ValueError, match=f"SOURCE_DATE_EPOCH is '{seconds}', which is not a number of seconds since 1970: "
    ):
        page(converted("cnn"))


def test_scripts_are_short() -> None:
    folder = Path(autocastfx.__file__).parent / "report" / "assets"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
    assert {name: asset(name).count("\n") for name in SCRIPTS if asset(name).count("\n") > 300} == {}


def colours(theme: int) -> dict[str, tuple[float, ...]]:
    """The named colours of the style sheet, in light (0) or dark (1)."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", asset("page.css"))
    return {name: tuple(int(pair[theme][i : i + 2], 16) / 255 for i in (1, 3, 5)) for name, *pair in found}


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_outlines_have_the_contrast_of_wcag_aa(theme: int) -> None:
    named = colours(theme)
    shades = ("low", "float32", "mixed", "given", "other")
    texts = [("text", f"{shade}-fill") for shade in shades] + [(shade, "page") for shade in shades]  # chips
    texts += [(name, "page") for name in ("text", "muted", "accent")]
    texts += [("text", "stage"), ("muted", "stage"), ("text", "group-fill"), ("cast", "cast-fill")]
    texts += [("cast", f"{shade}-fill") for shade in shades]
    texts += [("text", f"{heat}-fill") for heat in (*(f"heat{level}" for level in range(5)), "lost")]
    texts += [("alert", "alert-fill"), ("change", "page"), *(("change", f"{shade}-fill") for shade in shades)]
    outlines = [(shade, "stage") for shade in shades] + [("edge", "stage"), ("cast", "stage"), ("accent", "stage")]
    for front, back in texts:
        assert contrast(named[front], named[back]) >= 4.5, (front, back)
    for front, back in outlines:
        assert contrast(named[front], named[back]) >= 3, (front, back)


def test_the_code_of_its_documentation_writes_it(tmp_path: Path) -> None:
    text = (DOCS / "page.md").read_text(encoding="utf-8")
    run(text, tmp_path)
    assert data((tmp_path / "model.html").read_text(encoding="utf-8"))["variants"]
    for image in re.findall(r"\]\((images/[\w-]+\.png)\)", text):
        assert (DOCS / image).stat().st_size < 300_000
