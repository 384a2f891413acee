"""Tables of the documentation, made of the words of the package: of op lists, of those that the parser takes.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping

from autocastfx.passes.decide.checks import CHECKS
from autocastfx.policy import read_rules
from autocastfx.policy.float8 import RECIPES
from autocastfx.policy.op_list import KEYS
from autocastfx.policy.saved import KEEPS, SAVED_KEYS

_TABLE = re.compile(r"<!-- table: ([\w ]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def _table(word: str, meanings: Mapping[str, str]) -> str:
    rows = (f"| `{key}` | {meaning} |" for key, meaning in meanings.items())
    return "\n".join((f"| {word} | meaning |", "|---|---|", *rows))


def _keys() -> Mapping[str, str]:
    """The keys of a list, those of the categories as one."""
    categories = "`, `".join(read_rules.CATEGORIES)
    others = {key: meaning for key, meaning in KEYS.items() if key not in read_rules.CATEGORIES}
    return {categories: KEYS["allow"], **others}


TABLES: Mapping[str, str] = {
    "categories": _table("category", read_rules.CATEGORIES),
    "keys": _table("key", _keys()),
    "unlisted": _table("word", read_rules.UNLISTED),
    "placement": _table("word", read_rules.PLACEMENTS),
    "entry": _table("key", read_rules.ENTRY_KEYS),
    "demands": _table("key", read_rules.DEMAND_KEYS),
    "through": _table("word", read_rules.DEMANDS),
    "modules": _table("key", read_rules.MODULE_KEYS),
    "module categories": _table("word", read_rules.MODULE_CATEGORIES),
    "float8": _table("key", read_rules.FLOAT8_KEYS),
    "recipes": _table("word", {name: recipe.meaning for name, recipe in RECIPES.items()}),
    "products": _table("word", read_rules.FLOAT8_PRODUCTS),
    "saved": _table("key", SAVED_KEYS),
    "keep": _table("word", KEEPS),
}


def _reasons() -> str:
    """What is looked for under each reason, in the order of the checks, and what a person can do about it."""
    checks = [check for check in CHECKS if check.forces is not None]
    rows = (
        f"| `{check.forces}` | {check.category} | {_first_sentence(check.look)} | {check.forces.remedy} |"
        for check in checks
    )
    return "\n".join(("| reason | category | a node has it if | what to do |", "|---|---|---|---|", *rows))


def _first_sentence(function: Callable[..., object]) -> str:
    return inspect.getdoc(function).partition("\n")[0].removesuffix(".")


OTHER_TABLES: Mapping[str, str] = {"reasons": _reasons()}


def names(markdown: str) -> list[str]:
    """The tables that ``markdown`` has a place for, in order."""
    return _TABLE.findall(markdown)


def filled(markdown: str) -> str:
    """``markdown`` with each of its tables as the parser's words give it."""
    return _TABLE.sub(
        lambda match: f"<!-- table: {match[1]} -->\n\n{(TABLES | OTHER_TABLES)[match[1]]}\n\n<!-- end of table -->",
        markdown,
    )
