"""A browser, and pages for it, which all have one date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import autocastfx
from tests.browser import Browser, browser
from tests.report.shown import Shown


@pytest.fixture(autouse=True)
def _same_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


@pytest.fixture
def shown(tmp_path: Path) -> Callable[..., Shown]:
    def write(amp_model: autocastfx.AmpModule, **options: object) -> Shown:
        path = tmp_path / "page.html"
        autocastfx.dump(amp_model, path, "html", **options)  # type: ignore[arg-type]
        return Shown(amp_model, path)

    return write
