"""docs/yaml-reference.md, made of the words that the parser takes and of the shipped lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import yaml

from autocastfx.policy import read_rules
from autocastfx.policy.float8 import RECIPES
from autocastfx.policy.op_list import KEYS, load_op_list, preset_path, presets
from autocastfx.policy.read_rules import UNLISTED_CATEGORIES
from tests.golden.readme import README

PAGE = README.parent / "docs" / "yaml-reference.md"


def page() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# YAML reference"
    yield ""
    yield "<!-- Written by `python -m tests.golden` from autocastfx/policy/ and the lists in op_lists/. -->"
    yield ""
    yield "All keys and values of an op list. Any other word is an error that names the line and the nearest word."
    yield "[Op lists](op-lists.md) explains how to write a list, how to name ops, and which rule wins."
    yield "The [glossary](glossary.md) explains the terms."
    yield from _section("Keys of a list", "All keys are optional, but a file has at least one.")
    yield from _table("key", KEYS)
    yield from _section("Categories")
    yield from _table("category", read_rules.CATEGORIES)
    yield from _section(
        "Keys of an entry",
        "An entry under a category is an op, an op with these keys (`op: {…}`), or a group with these "
        "keys (`{ops: […], …}`).",
    )
    yield from _table("key", read_rules.ENTRY_KEYS)
    yield from _section(
        "Values in `when`",
        "The arguments and the types of their values come from the op's schema. `null` stands for `None`, if the "
        "argument may be None. A list argument matches a value if all its members have it.",
    )
    yield from _table("type in the schema", read_rules.VALUES, title="in YAML")
    yield from _section("Keys of an entry under `modules`", "`path` is required, and `category` or `float8`.")
    yield from _table("key", read_rules.MODULE_KEYS)
    yield ""
    yield "`category` is one of the categories above, or"
    yield ""
    yield from _table("word", read_rules.MODULE_CATEGORIES)
    yield from _section("Keys of an entry under `demands`", "`ops` is required.")
    yield from _table("key", read_rules.DEMAND_KEYS)
    yield ""
    yield "`through` is one of"
    yield ""
    yield from _table("word", read_rules.DEMANDS)
    yield from _section("Keys of an entry under `float8`", "`ops` is required.")
    yield from _table("key", read_rules.FLOAT8_KEYS)
    yield ""
    yield "`recipe` is one of torchao's, where `rowwise_gw_hp` is `rowwise_with_gw_hp`:"
    yield ""
    yield from _table("word", {name: recipe.meaning for name, recipe in RECIPES.items()})
    yield ""
    yield "`products` are of"
    yield ""
    yield from _table("word", read_rules.FLOAT8_PRODUCTS)
    yield from _section("Devices")
    devices = ", ".join(f"`{device}`" for device in read_rules.DEVICES)
    yield f"Device types, not single devices: {devices}, or the name of your own backend."
    yield from _section("`unlisted`")
    yield from _table("word", read_rules.UNLISTED)
    yield from _section("`placement`")
    yield from _table("word", read_rules.PLACEMENTS)
    shipped = "The number of rules in each list, and what it extends. `autocastfx lists show NAME` prints a list."
    yield from _section("The shipped lists", shipped)
    categories = tuple(read_rules.CATEGORIES)
    yield f"| list | extends | placement | unlisted | {' | '.join(f'`{c}`' for c in categories)} | `modules` |"
    yield f"|---|---|---|---|{'---|' * (len(categories) + 1)}"
    yield from map(_shipped, presets())
    yield ""


def _section(title: str, text: str = "") -> Iterator[str]:
    yield from ("", f"## {title}", "")
    if text:
        yield from (text, "")


def _table(word: str, meanings: Mapping[str, str], title: str = "meaning") -> Iterator[str]:
    yield f"| {word} | {title} |"
    yield "|---|---|"
    yield from (f"| `{key}` | {meaning} |" for key, meaning in meanings.items())


def _shipped(name: str) -> str:
    op_list = load_op_list(preset_path(name))
    count = Counter(str(rule.category) for rule in (*op_list.rules.values(), *op_list.conditional.values()))
    data = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
    extends = data.get("extends", [])
    extended = ", ".join(f"`{base}`" for base in ([extends] if isinstance(extends, str) else extends)) or "nothing"
    unlisted = next((word for word, category in UNLISTED_CATEGORIES.items() if category is op_list.unlisted), "keep")
    counts = [str(count[category]) for category in read_rules.CATEGORIES]
    cells = (
        f"`{name}`",
        extended,
        f"`{op_list.placement or 'cut'}`",
        f"`{unlisted}`",
        *counts,
        str(len(op_list.modules)),
    )
    return f"| {' | '.join(cells)} |"
