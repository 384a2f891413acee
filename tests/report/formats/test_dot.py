from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

import autocastfx
from autocastfx.plan.plan import Plan
from autocastfx.report.formats import render_dot
from autocastfx.report.view import Row, View
from tests.golden.models import CASES, converted

TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[{}\[\]=,;]|[\w.]+)')


@dataclass
class Drawing:
    """What a DOT text declares."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)


def parse(text: str) -> Drawing:
    """Read the part of DOT's grammar that a dump uses, strictly: any other text is an error."""
    tokens = []
    rest = text.strip()
    while rest:
        match = TOKEN.match(rest)
        assert match, f"no token of DOT: {rest[:40]!r}"
        tokens.append(match[1])
        rest = rest[match.end() :]
    assert tokens[:3] == ["digraph", "autocastfx", "{"]
    drawing = Drawing()
    assert statements(tokens, 3, drawing) == len(tokens)
    return drawing


def statements(tokens: list[str], at: int, drawing: Drawing) -> int:
    while tokens[at] != "}":
        if tokens[at] == "subgraph":
            assert tokens[at + 2] == "{"
            assert tokens[at + 3 : at + 5] == ["label", "="]
            drawing.clusters[tokens[at + 1]] = tokens[at + 5]
            at = statements(tokens, at + 7, drawing)
            continue
        first, second, at = tokens[at], "", at + 1
        if tokens[at] == "->":
            second, at = tokens[at + 1], at + 2
        attributes, at = attribute_list(tokens, at)
        assert tokens[at] == ";"
        at += 1
        if second:
            drawing.edges.append((first, second))
        elif first not in ("graph", "node", "edge"):
            drawing.repeated += [first] * (first in drawing.nodes)
            drawing.nodes[first] = attributes
    return at + 1


def attribute_list(tokens: list[str], at: int) -> tuple[dict[str, str], int]:
    attributes: dict[str, str] = {}
    if tokens[at] != "[":
        return attributes, at
    while tokens[at] != "]":
        assert tokens[at] in "[,"
        assert tokens[at + 2] == "="
        attributes[tokens[at + 1]] = tokens[at + 3]
        at += 4
    return attributes, at + 1


@pytest.mark.parametrize("name", CASES)
def test_every_node_once_and_edges_between_nodes(name: str) -> None:
    amp_model = converted(name)
    drawing = parse(autocastfx.dump(amp_model, format="dot"))
    assert drawing.repeated == []
    own = [node for node in drawing.nodes if "/" not in node]
    assert own == [f'"{node.name}"' for node in amp_model.graph.nodes]
    assert {end for edge in drawing.edges for end in edge} <= drawing.nodes.keys()
    between = {(f'"{read.name}"', f'"{node.name}"') for node in amp_model.graph.nodes for read in node.all_input_nodes}
    assert between == {edge for edge in drawing.edges if "/" not in edge[0] + edge[1]}


@pytest.mark.parametrize("name", CASES)
def test_precision_is_a_shape_and_a_word(name: str) -> None:
    amp_model = converted(name)
    drawing = parse(autocastfx.dump(amp_model, format="dot"))
    for planned in amp_model.plan.nodes:
        look = drawing.nodes[f'"{planned.name}"']
        assert f"runs {planned.placement.run}" in look["label"]
        wanted = {"low": '"box"', "float32": '"ellipse"', "captured": '"plain"'}[planned.placement.run]
        assert look["shape"] == wanted
    for cast in amp_model.plan.casts:
        look = drawing.nodes[f'"{cast.name}"']
        assert look["shape"] == '"diamond"'
        assert f"→ {cast.dtype}" in look["label"]


def test_a_sub_graph_is_a_cluster() -> None:
    drawing = parse(autocastfx.dump(converted("no_grad"), format="dot"))
    assert list(drawing.clusters) == ['"cluster_submod_1"']
    runner = drawing.clusters['"cluster_submod_1"'].rpartition(" ")[2]
    assert ('"submod_1/output"', '"' + runner) in drawing.edges


def test_text_is_escaped() -> None:
    rows = (Row('a"b', "parameter", 'c\\d"'), Row("e", "output", reads=('a"b',)))
    text = render_dot(View(Plan("float16", "cpu", 'my "list"', (), ()), "one\ntwo", rows))
    drawing = parse(text)
    assert list(drawing.nodes) == ['"a\\"b"', '"e"']
    assert drawing.nodes['"a\\"b"']["label"] == '"parameter\\nc\\\\d\\""'
    assert drawing.edges == [('"a\\"b"', '"e"')]
    assert r"op list my \"list\"\lvariant: one\ltwo\l" in text
