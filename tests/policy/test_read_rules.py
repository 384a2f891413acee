"""The words of op lists: each is taken by the parser, and the page that lists them is up to date."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autocastfx.errors import OpListError
from autocastfx.policy import read_rules
from autocastfx.policy.float8 import Product
from autocastfx.policy.op_list import KEYS, OpList
from autocastfx.policy.read_rules import UNLISTED_CATEGORIES
from autocastfx.policy.rule import Category
from autocastfx.policy.saved import KEEPS, SAVED_KEYS, Keep
from tests.golden.list_tables import TABLES, filled, names
from tests.golden.readme import OP_LISTS


def test_the_tables_of_the_page_are_up_to_date() -> None:
    text = OP_LISTS.read_text(encoding="utf-8")
    assert text == filled(text), "run `python -m tests.golden` and review what changed"
    assert names(text) == list(TABLES)
    assert "op-lists" in (OP_LISTS.parent / "index.md").read_text(encoding="utf-8").split()


def test_the_words_are_those_of_the_parser() -> None:
    assert tuple(read_rules.CATEGORIES) == tuple(str(category) for category in Category)
    assert tuple(read_rules.UNLISTED) == tuple(UNLISTED_CATEGORIES)
    assert tuple(read_rules.FLOAT8_PRODUCTS) == tuple(str(product) for product in Product)
    assert set(read_rules.CATEGORIES) < set(KEYS)


EXAMPLES: dict[str, dict[str, Any]] = {
    **{category: {category: ["softmax"]} for category in read_rules.CATEGORIES},
    "modules": {"modules": [{"path": "head", "category": "low"}]},
    "keep_args": {"keep_args": {"batch_norm": "weight"}},
    "float8": {"float8": [{"ops": ["linear"]}]},
    "saved": {"saved": [{"keep": "float8"}]},
    "set_dtype": {"placement": "follow", "deny": ["softmax"], "set_dtype": ["softmax"]},
    "product_depth": {"product_depth": 16},
    "backward_depth": {"backward_depth": 4},
    "demands": {"demands": [{"ops": ["sin"], "reason": "an angle"}]},
    "reduction_depth": {"reduction_depth": {"mean": 4096, "*": None}},
    "aliases": {"aliases": {"my_lib::gelu": "gelu"}},
    "unlisted": {"unlisted": "deny"},
    "extends": {"extends": "float16"},
    "placement": {"placement": "simple"},
}


@pytest.mark.parametrize("key", list(KEYS))
def test_each_key_of_a_list_is_taken(key: str) -> None:
    assert OpList.of(EXAMPLES[key]) != OpList()


ENTRIES = {"reason": "measured", "when": {"dim": -1}, "devices": "cuda"}
DEMAND = {"through": "products", "arguments": ["other"], "of": ["sub"], "at": ["other"], "reason": "measured"}
FLOAT8 = {
    "recipe": "tensorwise",
    "products": ["output"],
    "least": {"M": 16},
    "last": False,
    "emulate": True,
    "reason": "measured",
    "devices": "cuda",
}
MODULES = {
    "float8": False,
    "path": "head",
    "category": "low",
    "reason": "measured",
    "ops": ["linear"],
    "devices": "cuda",
    "rank": 2,
}


@pytest.mark.parametrize(
    ("words", "entry", "under"),
    [
        (read_rules.ENTRY_KEYS, {"softmax": ENTRIES}, "deny"),
        (read_rules.ENTRY_KEYS, {"ops": ["softmax"], **ENTRIES}, "deny"),
        (read_rules.MODULE_KEYS, MODULES, "modules"),
        (read_rules.DEMAND_KEYS, {"ops": ["div"], **DEMAND}, "demands"),
        (read_rules.FLOAT8_KEYS, {"ops": ["linear"], **FLOAT8}, "float8"),
        (
            SAVED_KEYS,
            {"keep": "low", "ops": ["gelu"], "path": "layers.*", "devices": "cuda", "reason": "measured"},
            "saved",
        ),
    ],
)
def test_each_key_of_an_entry_is_taken(words: Mapping[str, str], entry: dict[str, Any], under: str) -> None:
    body = entry.get("softmax", entry)
    assert set(words) <= set(body)
    OpList.of({under: [entry]})
    body["whne"] = 1
    with pytest.raises(OpListError, match="'whne' is no key of"):
        OpList.of({under: [entry]})
    del body["whne"]


@pytest.mark.parametrize("word", KEEPS)
def test_each_way_to_keep_a_value_is_taken(word: str) -> None:
    assert OpList.of({"saved": [{"keep": word}]}).saved[0].effect is Keep(word)


@pytest.mark.parametrize("word", [*read_rules.MODULE_CATEGORIES, *read_rules.CATEGORIES])
def test_each_category_of_a_module_is_taken(word: str) -> None:
    assert OpList.of({"modules": [{"path": "head", "category": word}]}).modules[0].wanted == word


@pytest.mark.parametrize("word", read_rules.DEMANDS)
def test_each_way_of_a_demand_is_taken(word: str) -> None:
    lists = OpList.of({"demands": [{"ops": ["sin"], "through": word}]})
    found = lists.demand("sin_")
    assert (found.effect.through if found is not None else "nothing") == word


@pytest.mark.parametrize("device", read_rules.DEVICES)
def test_each_device_is_taken(device: str) -> None:
    (rule,) = OpList.of({"deny": [{"softmax": {"devices": device}}]}).every_rule()
    assert rule.device == device
