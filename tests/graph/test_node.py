"""A node has names, and arguments. Which arguments count as settings is tested here too."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autocastfx.graph.node import all_names, settings, stand_for


def traced() -> dict[str, fx.Node]:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=1).sum((), keepdim=True, dtype=None)

    return {node.name: node for node in fx.symbolic_trace(forward).graph.nodes}


def test_a_value_has_its_own_name_first_and_then_those_it_stands_for() -> None:
    node = traced()["cat"]
    assert all_names(node) == ("cat",)
    stand_for(node, "first", "second", "first")
    stand_for(node, "third")
    assert all_names(node) == ("cat", "first", "second", "third")


def test_settings_are_what_is_neither_value_nor_none() -> None:
    nodes = traced()
    assert dict(settings(nodes["cat"])) == {"dim": 1}
    assert [value for _, value in settings(nodes["sum_1"])] == [(), True]
