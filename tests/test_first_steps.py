"""The ways of a newcomer, a practitioner, a researcher and an engineer: what pages print, and what opens at a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import browser, needs_browser
from tests.first_steps import WAYS, Walk, go, walk


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return walk(tmp_path_factory.mktemp("first_steps"))


def test_everything_is_printed_as_the_pages_say(walked: Walk) -> None:
    assert walked.differing == ()
    assert "gives 163 Inf in float16" in walked.transcript
    assert walked.transcript.count("learned: True") == 3


@needs_browser
def test_the_pages_open_and_the_fault_is_shown(walked: Walk) -> None:
    with browser() as page:
        page.open(walked.pages["readme"])
        assert "Sequential" in page.text("body")
        assert page.complaints() == []
        page.open(walked.pages["fault"])
        assert "Inf and NaN begin at square (square)" in page.text("body")
        assert page.complaints() == []


def test_a_line_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nedited = print('one')\n```\n\n```text\ntwo\n```\n", encoding="utf-8")
    monkeypatch.setattr("tests.first_steps.README", page)
    monkeypatch.setattr("tests.first_steps.TUTORIAL", page)
    monkeypatch.setattr("tests.first_steps.FAULT", "")
    assert walk(tmp_path).differing == ("one\n", "one\n")


@pytest.mark.parametrize("reader", sorted(WAYS.keys() - {"practitioner"}))  # that one is in make integrations
def test_further_readers_see_what_their_pages_say(reader: str, tmp_path: Path) -> None:
    went = go(WAYS[reader](), tmp_path)
    assert went.differing == ()
    assert went.transcript


def test_errors_may_differ_in_their_last_digits_alone(tmp_path: Path) -> None:
    def differing(code: str, shown: str) -> tuple[str, ...]:
        return go((("page", f"```python\nprint({code!r})\n```\n\n```text\n{shown}\n```\n"),), tmp_path).differing

    assert differing("error 2.91e-03 of it", "error 2.95e-03 of it") == ()
    assert differing("error 2.91e-03 of it", "error 3.95e-03 of it")
    assert differing("error 2.91e-03 of it", "error 2.91e-03 of that")
