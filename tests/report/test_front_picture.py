"""The picture of plans by bytes and error, and ``Tuned.plot``, which draws it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.numerics.tune import Tuned
from autocastfx.report.front_picture import front_picture

CUTS = [(1e6, 1e-2), (2e6, 1e-3), (4e6, 1e-4)]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(
    cuts: list[tuple[float, float]] = CUTS,
    measured: list[tuple[float, float]] | None = None,
    tuned: tuple[float, float] | None = None,
    error: float | None = None,
    of_bytes: float | None = None,
) -> ElementTree.Element:
    picture = front_picture("a < b & c", cuts, measured or [], (4e6, 1e-2), tuned, error, of_bytes)
    return ElementTree.fromstring(picture)


def line(picture: ElementTree.Element) -> list[tuple[float, float]]:
    """The places of the cuts, from the left."""
    points = picture.find(f"{SVG}polyline").get("points").split()  # type: ignore[union-attr]
    return [tuple(map(float, point.split(","))) for point in points]  # type: ignore[misc]


def limits(picture: ElementTree.Element) -> list[str]:
    return [found.get("d", "") for found in picture.iter(f"{SVG}path") if found.get("class") == "axis limit"]


def words(picture: ElementTree.Element) -> list[str]:
    return [found.text or "" for found in picture.iter(f"{SVG}text")]


def test_bytes_go_to_the_right_and_ratios_of_errors_up() -> None:
    (x0, y0), (x1, y1), (x2, y2) = line(drawn(CUTS[::-1]))
    assert x2 - x1 == pytest.approx(2 * (x1 - x0), rel=0.01)  # places have one decimal
    assert y2 - y1 == pytest.approx(y1 - y0, rel=0.01)
    assert y0 < y1


def test_marks_words_and_what_they_say() -> None:
    picture = drawn(measured=[(2e6, 2e-3)], tuned=(1e6, 5e-3), error=1e-3, of_bytes=2e6)
    assert {"a < b & c", "start", "tuned", "budget", "MB moved in a call", "relative error"} <= set(words(picture))
    fills = [found.get("fill") for found in picture.iter(f"{SVG}path") if found.get("fill")]
    assert len(fills) == len(CUTS) + 1 + 1 + 1 + 2  # measured, start, tuned, and the legend
    (x, y) = line(picture)[1]  # the budgets are those of the second cut
    across, up, legend = limits(picture)
    assert f" {y}H" in across
    assert up.startswith(f"M{x} ")
    assert legend
    assert "tuned" not in words(drawn())


@pytest.mark.parametrize("cuts", [CUTS, []])
def test_a_tuned_plan_without_error_is_on_the_lower_edge(cuts: list[tuple[float, float]]) -> None:
    picture = drawn(cuts, tuned=(3e6, 0.0))
    (mark,) = (found.get("d", "") for found in picture.iter(f"{SVG}path") if found.get("fill") == "#D55E00")
    axis = next(found.get("d", "") for found in picture.iter(f"{SVG}path") if found.get("class") == "axis")
    (edge,) = re.findall(r"V([\d.]+)H", axis)
    assert f",{edge}m" in mark
    assert "tuned, without error" in words(picture)
    assert len(line(picture)) == len(cuts)


def test_a_budget_beyond_what_is_drawn_is_no_line() -> None:
    assert len(limits(drawn(error=0.5, of_bytes=1e9))) == 1


@pytest.mark.parametrize(("least", "expected"), [(5e-3, "7e-03"), (2e-3, "5e-03"), (1e-6, "1e-04")])
def test_errors_are_told_at_round_numbers(least: float, expected: str) -> None:
    said = [word for word in words(drawn([(1e6, 1e-2), (2e6, least)])) if re.fullmatch(r"\de-\d\d", word)]
    assert expected in said
    assert 3 <= len(said) <= 9


def test_bytes_are_told_in_round_megabytes() -> None:
    assert [word for word in words(drawn()) if re.fullmatch(r"[\d.]+", word)] == [
        "1",
        "1.5",
        "2",
        "2.5",
        "3",
        "3.5",
        "4",
    ]


@pytest.mark.parametrize("cuts", [[], [(3e6, 1.0)]])
def test_few_points_are_drawn_too(cuts: list[tuple[float, float]]) -> None:
    picture = front_picture("few", cuts, [], None, None)
    assert not re.search(r"nan|inf\b", picture)
    assert len(line(ElementTree.fromstring(picture))) == len(cuts)


def tuned() -> Tuned:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    batches = [torch.randn(16, 8) for _ in range(2)]
    return autocastfx.tune(model, batches, lambda output, _: output.square().mean(), dtype="bfloat16")


def test_what_tune_found_is_drawn(tmp_path: Path) -> None:
    found = tuned()
    (tmp_path / "front.svg").write_text("old")
    text = found.plot(tmp_path / "front.svg")
    assert (tmp_path / "front.svg").read_text(encoding="utf-8") == text == found.plot()
    picture = ElementTree.fromstring(text)
    assert words(picture)[0] == "bfloat16 on cpu: error of the gradient against bytes"
    assert (("tuned" if found.point.error else "tuned, without error") in words(picture)) == found.gains
    cuts = sorted({(p.bytes, p.predicted) for p in found.front if p.name == "cut" and p.predicted})
    assert len(line(picture)) == len(cuts) > 0


def test_a_picture_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no"):
        tuned().plot(tmp_path / "no" / "front.svg")
