"""Names of nodes are the plan's, in sub-graphs too, and weights are found behind views and borders of graphs."""

from __future__ import annotations

import torch
from torch import nn

import autocastfx
from autocastfx.graph.node import attribute, uses
from autocastfx.graph.walk import walk
from tests.golden.models import converted


def test_names_are_those_of_the_plan_in_the_captured_and_in_the_converted_graph() -> None:
    amp_model = converted("no_grad")
    (captured,) = [v.captured for v in amp_model._shown if v.graph is amp_model.graph]
    assert captured is not None
    names = [one.name for one in walk(captured.graph, captured.attributes)]
    planned = [n.name for n in amp_model.plan.nodes]
    assert "submod_1/linear" in names
    assert [name for name in planned if name in names] == names
    held = {str(n.target): attribute(amp_model, str(n.target)) for n in amp_model.graph.nodes if n.op == "get_attr"}
    after = {one.name for one in walk(amp_model.graph, held)}
    assert {cast.name for cast in amp_model.plan.casts} <= after
    assert "submod_1/linear" in after


def test_weights_are_found_behind_views_and_in_sub_graphs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                first = x @ self.weight.t()
            return first @ self.weight[:, :4]

    amp_model = autocastfx.convert(Tied(), torch.ones(2, 8), dtype="float16")
    captured = amp_model.variants[0].captured
    assert captured is not None
    found = {
        one.name: [one.stored_as(use.node) for use in uses(one.node)]
        for one in walk(captured.graph, captured.attributes)
        if one.name.rpartition("/")[2].startswith("matmul")
    }
    assert list(found.values()) == [["", "weight"], ["", "weight"]]
