"""The GraphML that networkx reads back."""

from __future__ import annotations

import networkx as nx
import pytest

import autocastfx
from tests.golden.models import CASES, converted


@pytest.mark.parametrize("name", CASES)
def test_it_is_read_back_with_every_node_its_attributes_and_edges(name: str) -> None:
    amp_model = converted(name)
    graph = nx.parse_graphml(autocastfx.dump(amp_model, format="graphml"))
    assert nx.is_directed_acyclic_graph(graph)
    for planned in amp_model.plan.nodes:
        found = graph.nodes[planned.name]
        assert found["op"] == planned.op
        assert found["source"] == str(planned.decision.source)
        assert found["runs"] == str(planned.placement.run)
    for cast in amp_model.plan.casts:
        assert graph.nodes[cast.name]["kind"] == "cast"
        assert graph.nodes[cast.name]["bytes"] == cast.bytes
        assert set(cast.readers) <= set(graph.successors(cast.name))
    assert graph.graph["summary"].startswith(f"autocastfx: {amp_model.plan.low} on cpu, op list ")


def test_each_value_read_is_an_edge() -> None:
    amp_model = converted("cnn")
    graph = nx.parse_graphml(autocastfx.dump(amp_model, format="graphml"))
    for node in amp_model.graph.nodes:
        assert set(graph.predecessors(node.name)) == {read.name for read in node.all_input_nodes}
