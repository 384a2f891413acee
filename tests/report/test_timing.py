"""Times of sides as a table, as advice, and on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import autocastfx
from autocastfx.report.timing import TimedSide, Timing
from tests.browser import browser, needs_browser
from tests.numerics.test_time import SIDES, Net, X


def side(name: str, ms: float, ratio: float, **ops: float) -> TimedSide:
    return TimedSide(name, (ms, ms), (ratio - 0.01, ratio, ratio + 0.01), ops)


TABLE = Timing(
    "Net",
    "cpu",
    (
        side("float32", 20.0, 2.0),
        side("torch.autocast", 10.0, 1.0, softmax=1.0),
        side("converted", 11.0, 1.1, softmax=2.5, mm=4.0),
        side("cached and kernel", 9.0, 0.9),
    ),
)


def test_what_to_change_is_said() -> None:
    assert TABLE.advice == (
        'the fastest is weights="cached", fold="kernel": 0.90 of torch.autocast\'s time.',
        "the default takes 4 ms more in mm: explain shows why it runs so.",
    )
    lines = str(TABLE).splitlines()
    assert lines[0] == "Net"
    assert lines[4].split()[:5] == ["converted", "11", "1.10", "(1.09", "to"]
    assert lines[-2:] == list(TABLE.advice)


def test_a_gpu_that_waits_and_a_slow_dtype_are_said() -> None:
    waits = replace(TABLE, device="cuda")
    assert waits.advice[-1].startswith("the GPU waits for the host: kernels take 6.5 of 11 ms.")
    slow = replace(TABLE, sides=(side("float32", 5.0, 0.5), *TABLE.sides[1:3], side("cached and kernel", 10.5, 1.0)))
    assert slow.advice[0] == (
        "nothing is faster than torch.autocast for certain: cached and kernel takes 0.99 to 1.01."
    )
    assert slow.advice[-1].startswith("float32 is the fastest")


@needs_browser
def test_the_page_has_a_tab_of_times(tmp_path: Path) -> None:
    amp_model, path = autocastfx.convert(Net(), X, dtype="bfloat16"), tmp_path / "net.html"
    with browser() as page:
        autocastfx.dump(amp_model, path)
        page.open(path)
        assert page.count("#tab-times") == 0
        autocastfx.dump(amp_model, path, timing=TABLE)
        page.open(path)
        page.click("#tab-times")
        assert all(line in page.text("#panel") for line in TABLE.advice)
        rows = page.run(
            "return [...document.querySelectorAll('#panel tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        )
        assert rows[3] == ["converted", "11", "1.10 (1.09 to 1.11)"]
        assert rows[5:] == [["op", *SIDES], ["mm", "", "", "4", ""], ["softmax", "", "1", "2.5", ""]]
        assert page.complaints() == []
    assert "timing" in autocastfx.show(amp_model, timing=TABLE).text
    with pytest.raises(TypeError, match=r"timing= takes what time\(\) returned, not a str"):
        autocastfx.dump(amp_model, path, timing="1 ms")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="timing= goes into format='html', not 'text'"):
        autocastfx.dump(amp_model, timing=TABLE)
