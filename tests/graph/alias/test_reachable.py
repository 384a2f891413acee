"""Breadth-first search: what is reached, in which order, and from which start."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autocastfx.graph.alias import reachable

EDGES: dict[str, tuple[str, ...]] = {"a": ("b", "c"), "b": ("d",), "c": ("d", "a"), "e": ("f",), "d": ("f",), "f": ()}


def test_each_is_reached_from_the_nearest_start_and_of_two_from_the_first() -> None:
    assert reachable(["a"], EDGES.__getitem__) == dict.fromkeys("abcdf", "a")
    assert reachable(["a", "e"], EDGES.__getitem__)["f"] == "e"
    assert reachable(["b", "c"], EDGES.__getitem__)["d"] == "b"
    assert reachable(["c", "b"], EDGES.__getitem__)["d"] == "c"


def test_the_nearest_come_first_and_a_start_leads_to_itself() -> None:
    assert list(reachable(["a"], EDGES.__getitem__)) == ["a", "b", "c", "d", "f"]
    assert reachable(["f"], EDGES.__getitem__) == {"f": "f"}
    assert reachable([], EDGES.__getitem__) == {}


def test_neighbours_are_asked_once_for_each() -> None:
    asked: list[str] = []
    reachable(["a", "c"], lambda here: (asked.append(here), EDGES[here])[1])
    assert sorted(asked) == ["a", "b", "c", "d", "f"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.sets(st.integers(0, 9), max_size=3))
def test_it_reaches_what_networkx_reaches(edges: list[tuple[int, int]], starts: set[int]) -> None:
    graph: nx.DiGraph[int] = nx.DiGraph(edges)
    graph.add_nodes_from(range(10))
    assert set(reachable(starts, graph.successors)) == starts.union(*(nx.descendants(graph, s) for s in starts))
