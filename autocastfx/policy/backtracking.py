"""Regular expressions that take Python exponential time: a repetition of what matches a text in several ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

__all__ = ["may_backtrack"]

_PARSER: Any = getattr(re, "_parser", None) or cast("Any", re).sre_parse  # until Python 3.10
_COMPILER: Any = getattr(re, "_compiler", None) or cast("Any", re).sre_compile
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_GROUPS = ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT", "POSSESSIVE_REPEAT", "GROUPREF_EXISTS")


def may_backtrack(expression: str) -> bool:
    """Return whether a repetition without an end holds others, or alternatives, that nothing separates.

    A character separates that stands in each repetition, and that none of these can match.
    """
    return any(
        (variable := list(_variable(body))) and not any(_separates(char, variable) for char in _required(body))
        for body in _endless(_PARSER.parse(expression))
    )


def _parts(item: Any) -> Iterator[Any]:
    """Yield the sequences inside an item of a parsed expression."""
    kind, argument = str(item[0]), item[1]
    if kind == "BRANCH":
        yield from argument[1]
    elif kind in _REPEATS or kind in _GROUPS:
        members = argument if isinstance(argument, tuple) else (argument,)
        yield from (member for member in members if isinstance(member, _PARSER.SubPattern))


def _endless(sequence: Any) -> Iterator[Any]:
    """Yield what repetitions without an end repeat, anywhere in ``sequence``."""
    for item in sequence:
        if str(item[0]) in _REPEATS and item[1][1] == _PARSER.MAXREPEAT:
            yield item[1][2]
        for part in _parts(item):
            yield from _endless(part)


def _variable(sequence: Any) -> Iterator[Any]:
    """Yield the items in ``sequence`` that match in several ways: repetitions, and alternatives."""
    for item in sequence:
        kind = str(item[0])
        if kind == "BRANCH" or (kind in _REPEATS and item[1][0] != item[1][1]):
            yield item
        else:
            for part in _parts(item):
                yield from _variable(part)


def _required(sequence: Any) -> Iterator[str]:
    """Yield the characters that each match of ``sequence`` has."""
    for item in sequence:
        if str(item[0]) == "LITERAL":
            yield chr(item[1])
        elif str(item[0]) == "SUBPATTERN":
            yield from _required(item[1][3])


def _separates(char: str, variable: list[Any]) -> bool:
    return not any(_matches(item, char) for item in variable)


def _matches(item: Any, char: str) -> bool:
    """Whether a character may be in what an item matches; of what the compiler does not take alone, it may."""
    leaves = list(_leaves(item))
    return any(_COMPILER.compile(leaf, re.IGNORECASE | re.DOTALL).fullmatch(char) is not None for leaf in leaves)


def _leaves(item: Any) -> Iterator[Any]:
    parts = list(_parts(item))
    for part in parts:
        for inner in part:
            yield from _leaves(inner)
    if not parts and str(item[0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        yield _PARSER.SubPattern(_PARSER.State(), [item])
