"""JSON text: one kind of error, with its place, for all that Python itself stumbles over."""

from __future__ import annotations

import json

import pytest

from autocastfx.files import parsed_json


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
