"""Cells in columns that fit a width: what is shortened first, and what is kept."""

from __future__ import annotations

import pytest

from autocastfx.report.columns import Column, aligned, wrapped

PATH = "model.layers.11.attention.query"
COLUMNS = [Column("name"), Column("empty"), Column("module", is_path=True, paint="dim")]
ROWS = [("a", "", "head"), ("softmax_of_scores", "", PATH)]


def test_columns_without_a_text_are_left_out_and_none_is_shortened_without_a_width() -> None:
    assert aligned(COLUMNS, ROWS) == [
        "name               module",
        "a                  head",
        f"softmax_of_scores  {PATH}",
    ]


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (31, PATH),
        (30, "model.layers.11.….query"),
        (22, "model.….11.….query"),
        (12, "….11.….query"),
        (8, "….11.q…y"),
        (6, "….11.…"),
    ],
)
def test_of_a_path_numbers_stay_then_the_last_name(room: int, shown: str) -> None:
    assert Column("", is_path=True).shortened(PATH, room) == shown


def test_the_widest_columns_are_cut_to_one_level() -> None:
    painted = aligned(COLUMNS, ROWS, 31, lambda text, paint: text.upper() if paint else text)
    assert painted == ["name             module", "a                HEAD", "softmax…_scores  ….11.….QUERY"]
    assert max(map(len, aligned(COLUMNS, ROWS, 24))) <= 24


def test_a_last_cell_extends_over_the_columns_that_its_row_lacks() -> None:
    assert aligned([Column("a"), Column("b")], [("x", "y"), ("prose over all",)], 9) == ["a  b", "x  y", "prose ov…"]


def test_prose_is_wrapped_between_words() -> None:
    assert wrapped("one two-three four", 9, "  ") == ["one", "  two-three", "  four"]
    assert wrapped("one two", None, "  ") == ["one two"]
