"""A file is there whole, or as it was before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autocastfx.files import check_writable, read_whole, replacing, write_whole


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
