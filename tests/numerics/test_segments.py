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
from autocastfx.numerics import segments
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


@pytest.mark.parametrize(("kept", "passed"), [(1.0, 4.0), (6.0, 4.0)])
def test_a_model_of_blocks_is_divided_where_they_meet(kept: float, passed: float) -> None:
    graph = graph_of(Blocks())
    parts = segments_of(graph, alias_sets(graph), kept, passed)
    assert len(parts) > 3
    for segment in parts[:-1]:
        assert [tuple(node.meta["val"].shape) for node in segment.gives] == [(16, NARROW)]


def test_all_nodes_are_in_one_segment_each_in_order() -> None:
    graph = graph_of(Blocks())
    parts = segments_of(graph, alias_sets(graph), 1.0, 0.0)
    nodes = [node for segment in parts for node in segment.nodes]
    assert nodes == [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    made = {node: i for i, segment in enumerate(parts) for node in segment.nodes}
    for i, segment in enumerate(parts):
        assert all(made.get(read, -1) < i for read in segment.reads)
        assert set(segment.gives) == {n for n in segment.nodes if any(made[user] > i for user in n.users)}


def test_values_that_are_dear_to_hold_are_divided_less() -> None:
    graph = graph_of(Blocks(32))
    counts = [len(segments_of(graph, {}, kept, 0.0)) for kept in (0.0, 30.0, 1e6)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1


def test_a_storage_that_is_written_into_is_not_divided() -> None:
    graph = graph_of(InPlace())
    shared = alias_sets(graph)
    assert shared
    for segment in segments_of(graph, shared, 0.0, 0.0):
        assert not set(segment.gives) & shared.keys() or segment.nodes[-1].next.op == "output"
    inside = [set(segment.nodes) & shared.keys() for segment in segments_of(graph, shared, 0.0, 0.0)]
    assert sum(map(bool, inside)) == 1


def test_an_op_of_several_tensors_stays_with_what_reads_them() -> None:
    graph = graph_of(Pair())
    for segment in segments_of(graph, alias_sets(graph), 0.0, 0.0):
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in segment.gives)


def test_the_whole_holds_the_output() -> None:
    graph = graph_of(Pair())
    (only,) = whole(graph)
    assert [node.op for node in only.nodes][-1] == "output"
    assert not only.gives
    assert all(a in only.nodes or a.op == "placeholder" for a, _ in itertools.pairwise(graph.nodes))


NODES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)), min_size=2, max_size=7)


@given(NODES, st.sampled_from([0.0, 1.0, 6.0]), st.sampled_from([0.0, 4.0]))
def test_the_cuts_need_the_least_memory_and_then_keep_the_least(
    nodes: list[tuple[int, int, int]], kept: float, passed: float
) -> None:
    """Beside every way to cut. A node has elements to move, elements of its value, and how far away that is read."""
    count = len(nodes)
    sizes = list(itertools.accumulate((size for size, _, _ in nodes), initial=0))
    own = [size for _, size, _ in nodes]
    last = [min(i + away, count) for i, (_, _, away) in enumerate(nodes)]
    passing = [float(sum(own[i] for i in range(end) if last[i] >= end)) for end in range(count + 1)]
    places = _Places(sizes, last, own, range(count + 1), passing, kept, passed)

    def given_before(cuts: tuple[int, ...]) -> list[int]:
        """By segment, the elements that those before it give."""
        parts = list(itertools.pairwise((0, *cuts, count)))
        made = [sum(own[i] for i in range(a, b) if last[i] >= b) for a, b in parts]
        return list(itertools.accumulate(made[:-1], initial=0))

    def memory(cuts: tuple[int, ...]) -> float:
        parts = zip(itertools.pairwise((0, *cuts, count)), given_before(cuts), strict=True)
        inside = ((segments._INSIDE * (sizes[b] - sizes[a]), a, given) for (a, b), given in parts)
        return max(size + kept * given + passed * (passing[a] if a else 0.0) for size, a, given in inside)

    ways = [c for n in range(count) for c in itertools.combinations(range(1, count), n)]
    least = min(map(memory, ways))
    alive = places._alive()
    for most in (least, 1.5 * least):
        found = places._cuts(most, alive)
        assert found is not None
        assert memory(found) <= most
        assert given_before(found)[-1] == min(given_before(c)[-1] for c in ways if memory(c) <= most)
    assert least == 0 or places._cuts(0.99 * least, alive) is None
    assert memory(places.best_cuts()) <= segments._MORE * segments._CLOSE * least
