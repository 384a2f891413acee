"""The nodes of a page by columns: nothing is lost, each value stands once, and a node takes little text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autocastfx
from autocastfx.report.dump import view_of
from autocastfx.report.html import page_data
from autocastfx.report.packed import packed
from tests.report.shown import unpacked

WORDS = st.text("abc.→\n", max_size=4)
VALUES = st.recursive(
    WORDS | st.integers() | st.booleans() | st.floats(allow_nan=False), lambda v: st.lists(v, max_size=2), max_leaves=3
)
NODES = st.lists(st.fixed_dictionaries({"name": WORDS}, optional={"module": WORDS, "says": VALUES, "other": VALUES}))


@given(NODES)
def test_nothing_is_lost(nodes: Sequence[Mapping[str, Any]]) -> None:
    assert unpacked(json.loads(json.dumps(packed(nodes)))) == [dict(node) for node in nodes]


def test_equal_values_stand_once_and_a_nodes_own_name_and_module_nowhere() -> None:
    nodes = [
        {"name": name, "module": module, "says": f"{name} in {module} is low", "reads": [1]}
        for name, module in (("linear", "first"), ("gelu", "second.act"))
    ]
    assert packed(nodes) == {
        "count": 2,
        "columns": {
            "name": {"of": ["linear", "gelu"], "at": "0 1"},
            "module": {"of": ["first", "second.act"], "at": "0 1"},
            "says": {"of": ["\x01 in \x02 is low"], "at": "0 0"},
            "reads": {"of": [[1]], "at": "0 0"},
        },
    }


def test_a_node_of_a_transformer_takes_at_most_seven_hundred_bytes() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    amp_model = autocastfx.convert(model, torch.ones(2, 16, 64), dtype="bfloat16", check=False)
    variant = page_data([view_of(amp_model)], 0)["variants"][0]
    text = json.dumps({**variant, "nodes": packed(variant["nodes"])}, ensure_ascii=False, separators=(",", ":"))
    assert len(text.encode()) <= 700 * len(amp_model.plan.nodes)
