"""Messages show values and names shortened, and places."""

from __future__ import annotations

import pickle

import pytest

from autocastfx.errors import KeyPath, OpListError, Source, UnknownNameError, listed, shown


def test_long_integers_are_told_by_their_length() -> None:
    assert (shown(2**256 - 1), shown("a")) == (str(2**256 - 1), "'a'")
    assert shown(-(2**256)) == "int of 257 bits"


def test_the_first_names_are_listed_and_the_others_counted() -> None:
    assert [listed(["a", "b", "c"], most) for most in (2, 3, 4)] == ["a, b and 1 more", "a, b, c", "a, b, c"]


def test_places_in_data_are_paths() -> None:
    place = KeyPath("mine").key("modules").index(2).key(2**300)
    assert (str(KeyPath("mine")), str(place)) == ("mine", "mine:modules[2].int of 301 bits")
    assert place.portable == place


@pytest.mark.parametrize("file", ["/home/me/mine.yaml", r"C:\me\mine.yaml", "mine.yaml"])
def test_an_absolute_path_is_cut_to_what_is_the_same_everywhere(file: str) -> None:
    assert str(Source(file, 3, 7).portable) == "mine.yaml:3:7"
    assert str(Source("lists/mine.yaml", 3, 7).portable) == "lists/mine.yaml:3:7"


def test_an_error_begins_with_its_place_and_is_shown_without_quotes() -> None:
    error = OpListError("no such op", Source("mine.yaml", 3, 7))
    assert (str(error), error.source) == ("mine.yaml:3:7: no such op", Source("mine.yaml", 3, 7))
    assert str(OpListError("no such op")) == "no such op"
    assert str(UnknownNameError("no node 'a'")) == "no node 'a'"
    assert str(pickle.loads(pickle.dumps(OpListError("no such op")))) == "no such op"
