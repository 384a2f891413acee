"""Where a graph is divided."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import export

from autocastfx.graph.alias import alias_sets
from autocastfx.numerics.segments import _Places, segments_of, whole

WIDE, NARROW = 64, 4


class Blocks(nn.Module):
    """Wide inside, narrow between."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(NARROW, WIDE) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(WIDE, NARROW) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(x)).exp())
        return x


class InPlace(Blocks):
    """One storage, written from the first block to the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for up, down in zip(self.ups, self.downs, strict=True):
            x += down(torch.tanh(up(x)).exp())
        return x


class Pair(nn.Module):
    """Whose op gives two tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = x.tanh().sort(dim=-1)
        return (values * places).sin().cos()


def graph_of(model: nn.Module) -> torch.fx.Graph:
    return export(model, (torch.randn(16, NARROW),)).module().graph


@pytest.mark.parametrize("held", [1.0, 6.0])
def test_a_model_of_blocks_is_divided_where_they_meet(held: float) -> None:
    graph = graph_of(Blocks())
    segments = segments_of(graph, alias_sets(graph), held)
    assert len(segments) > 3
    for segment in segments[:-1]:
        assert [tuple(node.meta["val"].shape) for node in segment.gives] == [(16, NARROW)]


def test_all_nodes_are_in_one_segment_each_in_order() -> None:
    graph = graph_of(Blocks())
    segments = segments_of(graph, alias_sets(graph), 1.0)
    nodes = [node for segment in segments for node in segment.nodes]
    assert nodes == [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    made = {node: i for i, segment in enumerate(segments) for node in segment.nodes}
    for i, segment in enumerate(segments):
        assert all(made.get(read, -1) < i for read in segment.reads)
        assert set(segment.gives) == {n for n in segment.nodes if any(made[user] > i for user in n.users)}


def test_values_that_are_dear_to_hold_are_divided_less() -> None:
    graph = graph_of(Blocks(32))
    counts = [len(segments_of(graph, {}, held)) for held in (0.0, 300.0, 1e6)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1


def test_a_storage_that_is_written_into_is_not_divided() -> None:
    graph = graph_of(InPlace())
    shared = alias_sets(graph)
    assert shared
    for segment in segments_of(graph, shared, 0.0):
        assert not set(segment.gives) & shared.keys() or segment.nodes[-1].next.op == "output"
    inside = [set(segment.nodes) & shared.keys() for segment in segments_of(graph, shared, 0.0)]
    assert sum(map(bool, inside)) == 1


def test_an_op_of_several_tensors_stays_with_what_reads_them() -> None:
    graph = graph_of(Pair())
    for segment in segments_of(graph, alias_sets(graph), 0.0):
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in segment.gives)


def test_the_whole_holds_the_output() -> None:
    graph = graph_of(Pair())
    (only,) = whole(graph)
    assert [node.op for node in only.nodes][-1] == "output"
    assert not only.gives
    assert all(a in only.nodes or a.op == "placeholder" for a, _ in itertools.pairwise(graph.nodes))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=8), st.integers(0, 30))
def test_cuts_leave_the_least_excess_and_then_pass_the_least(nodes: list[tuple[int, int]], most: int) -> None:
    """Every way to cut a chain, each value read by the next node; cuts are tried where less passes than beside."""
    sizes = list(itertools.accumulate((size for size, _ in nodes), initial=0))
    passing = [0.0, *(float(size) for _, size in nodes[:-1]), 0.0]
    places = _Places(sizes, list(range(1, len(nodes) + 1)), passing, [0] * len(nodes))
    near = [i for i in range(1, len(nodes)) if passing[i] <= min(passing[i - 1 : i + 2])]

    def cost(cuts: tuple[int, ...]) -> tuple[float, float]:
        parts = itertools.pairwise((0, *cuts, len(nodes)))
        return sum(max(0, places.inside(a, b) - most) for a, b in parts), sum(passing[i] for i in cuts)

    ways = itertools.chain.from_iterable(itertools.combinations(near, count) for count in range(len(near) + 1))
    assert cost(places.cuts(most)) == min(map(cost, ways))
