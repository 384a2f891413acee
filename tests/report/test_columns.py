"""Cells in columns that fit a width: what is shortened first, and what is kept."""

from __future__ import annotations

from autocastfx.report.columns import Column, aligned, wrapped

PATH = "model.layers.11.attention.query"
COLUMNS = [Column("name"), Column("empty"), Column("module", is_path=True, paint="dim")]
ROWS = [("a", "", "head"), ("softmax_of_scores", "", PATH)]


def test_columns_without_a_text_are_left_out_and_none_is_shortened_without_a_width() -> None:
    assert aligned(COLUMNS, ROWS)[1:] == ["a                  head", f"softmax_of_scores  {PATH}"]


def test_of_a_path_numbers_stay_then_the_last_name() -> None:
    shown = [PATH, "model.layers.11.….query", "model.….11.….query", "….11.….query", "….11.q…y", "….11.…"]
    assert [Column("", is_path=True).shortened(PATH, room) for room in (31, 30, 22, 12, 8, 6)] == shown


def test_the_widest_columns_are_cut_to_one_level() -> None:
    painted = aligned(COLUMNS, ROWS, 31, lambda text, paint: text.upper() if paint else text)
    assert painted == ["name             module", "a                HEAD", "softmax…_scores  ….11.….QUERY"]
    assert max(map(len, aligned(COLUMNS, ROWS, 24))) <= 24


def test_a_last_cell_extends_over_the_columns_that_its_row_lacks() -> None:
    assert aligned([Column("a"), Column("b")], [("x", "y"), ("prose over all",)], 9) == ["a  b", "x  y", "prose ov…"]


def test_prose_is_wrapped_between_words() -> None:
    assert wrapped("one two-three four", 9, "  ") == ["one", "  two-three", "  four"]
    assert wrapped("one two", None, "  ") == ["one two"]
