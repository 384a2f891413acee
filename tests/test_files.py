"""A file is there whole, or as it was before; a dataclass goes to JSON and back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from autocastfx.errors import KeyPath
from autocastfx.files import (
    NON_FINITE_AS_TEXT,
    check_writable,
    parsed_json,
    plain_data,
    read_whole,
    replacing,
    typed_data,
    write_whole,
)


def test_a_file_is_replaced_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("before")
    with replacing(path) as unfinished:
        unfinished.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["plan.txt"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("before")

    def interrupted() -> None:
        with replacing(path) as unfinished:
            unfinished.write_text("aft")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["plan.txt"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "plan.txt"
    link.symlink_to(tmp_path / "there" / "real.txt")
    for text in ("first\n", "second\n"):
        write_whole(link, text)
        assert link.is_symlink()
        assert (tmp_path / "there" / "real.txt").read_bytes() == text.encode()
    assert os.listdir(tmp_path / "there") == ["real.txt"]


def test_what_is_no_plain_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_what_cannot_become_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="it is a folder; name a file in it"):
        check_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the folder .*no does not exist; create it first"):
        check_writable(tmp_path / "no" / "x.txt")
    check_writable(tmp_path / "x.txt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a\0b", "its path has a NUL character, which no file name has"),
        ("a\ud800", "a character that no file name has"),
    ],
)
def test_a_path_that_no_file_can_have(path: str, why: str) -> None:
    for act in (read_whole, check_writable, lambda path: write_whole(path, "text")):
        with pytest.raises(OSError, match=why):
            act(Path(path))


HERE = KeyPath("here")


class Kind(Enum):
    """A word of JSON text."""

    ONE = "one"


@dataclass(frozen=True)
class Part:
    """What a whole holds, some of it by default."""

    kind: Kind
    error: float
    place: KeyPath = HERE


@dataclass(frozen=True)
class Whole:
    """All that a stored dataclass may hold."""

    parts: tuple[Part, ...]
    by_name: Mapping[str, tuple[float, ...]]
    most: Part | None = None
    count: int = 0


WHOLE = Whole(
    (Part(Kind.ONE, math.inf), Part(Kind.ONE, 0.5, KeyPath("a", "b"))), {"x": (1.0, 2.5)}, Part(Kind.ONE, 1.0)
)


def test_a_dataclass_goes_to_json_and_back() -> None:
    data = plain_data(WHOLE, {**NON_FINITE_AS_TEXT, KeyPath: str, Kind: lambda kind: kind.value})
    assert data["parts"][1] == {"kind": "one", "error": 0.5, "place": "a:b"}
    assert data["by_name"] == {"x": [1.0, 2.5]}
    text = json.dumps(data, allow_nan=False)
    assert '"error": "inf"' in text
    assert typed_data(Whole, parsed_json(text), {KeyPath: lambda text: KeyPath(*text.split(":"))}) == WHOLE


def test_what_has_a_default_may_be_missing_and_nothing_else() -> None:
    assert typed_data(Whole, {"parts": [], "by_name": {}, "most": None}) == Whole((), {})
    assert typed_data(Part, {"kind": "one", "error": 1}) == Part(Kind.ONE, 1.0)
    for data in ({"kind": "one"}, {"kind": "one", "error": 1.0, "extra": 1}, {"kind": "one", "error": None}, [], None):
        with pytest.raises((TypeError, AttributeError)):
            typed_data(Part, data)
    with pytest.raises(ValueError, match="'two' is not a valid Kind"):
        typed_data(Part, {"kind": "two", "error": 1.0})


def test_what_is_json_is_read() -> None:
    for text in ('{"a": [1, 2.5, null, "x"]}', "[" * 100 + "]" * 100, "3", '"' + "1" * 5000 + '"', "1" * 4000):
        assert parsed_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 101 + "]" * 101, "it is nested too deeply: line 1 column 1 (char 0)"),
        ("[" * 100_000, "it is nested too deeply: line 1 column 1 (char 0)"),
        ("[\n" + "1" * 5000 + "]", "an integer has 5000 digits, too many to read: line 2 column 1 (char 2)"),
        (
            '["\\"' + "2" * 5000 + '",\n -' + "1" * 6000 + "]",
            "an integer has 6000 digits, too many to read: line 2 column 3 (char 5009)",
        ),
    ],
)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        parsed_json(text)
    assert str(caught.value) == message
