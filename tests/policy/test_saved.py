"""What the argument ``saved`` of a conversion stands for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autocastfx.errors import ArgumentError
from autocastfx.policy.saved import Keep, rules_of


def test_a_word_is_a_rule_for_all_and_entries_are_themselves() -> None:
    entries = [{"ops": ["gelu"], "keep": "recompute"}]
    assert rules_of("as computed") == []
    assert rules_of("recompute") == [{"keep": "recompute"}]
    assert rules_of(entries) == entries


@pytest.mark.parametrize("given", ["recomputed", 2, ["recompute"], {"keep": "recompute"}], ids=str)
def test_what_is_neither_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"saved is 'as computed', .* not {re.escape(repr(given))}"):
        rules_of(given)


def test_forms_in_words() -> None:
    assert [form.in_words for form in Keep] == ["as computed", "in bfloat16", "in float8", "recomputed"]
