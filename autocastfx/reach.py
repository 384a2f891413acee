"""Which nodes of one graph 16 bits cannot serve, for what their values are known to reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autocastfx.alias import alias_sets
from autocastfx.graph import has_float32, tensors, uses, value
from autocastfx.op_list import Category, OpList
from autocastfx.op_name import op_name

__all__ = ["Limit", "Reach", "reach"]


@dataclass(frozen=True)
class Reach:
    """What is known of a graph's values.

    Attributes:
        too_far: why a node must run in float32, for those that must.
        wide: values with finite numbers beyond the low dtype's range.
    """

    too_far: Mapping[fx.Node, str]
    wide: frozenset[fx.Node]


@dataclass(frozen=True)
class Limit:
    """How far a value may reach in 16 bits: the largest finite number of ``low``, divided by ``headroom``."""

    low: torch.dtype
    headroom: float = 1.0

    @property
    def largest(self) -> float:
        """The largest finite number of the dtype."""
        return float(torch.finfo(self.low).max)

    def passed(self, reached: float) -> bool:
        """Whether a value reaches too far."""
        return reached >= self.largest / self.headroom

    def shown(self, reached: float) -> str:
        """``reached`` beside the limit that it passed, in words."""
        name = f"{str(self.low).removeprefix('torch.')}'s {self.largest:.5g}"
        return f"beyond {name}" if reached > self.largest else f"within a factor {self.headroom:g} of {name}"


@dataclass(frozen=True)
class _Known:
    """How far a value reaches, and whose value that is: its own, or that of what it takes its elements from."""

    reached: float
    words: str


def reach(
    graph: fx.Graph, measured: Mapping[fx.Node, float], held: Mapping[str, float], op_list: OpList, limit: Limit
) -> Reach:
    """What the values of ``graph`` are known to reach, and what follows from it.

    A ``clear`` op that was not measured reaches what its inputs reach. A mask reaches as far as it likes: narrowed, it
    saturates. So may an input that the list keeps in float32.

    Args:
        graph: captured, with abstract values.
        measured: largest magnitudes of outputs on calibration data.
        held: those of what ``get_attr`` nodes read, by target.
        op_list: names arguments that stay float32, and which ops only move values.
        limit: of the conversion.
    """
    known: dict[fx.Node, _Known] = {}
    for node in graph.nodes:
        own = _own(node, measured, held, known, op_list)
        if own is not None:
            known[node] = own
    for storage in {id(s): s for s in alias_sets(graph).values()}.values():
        members = [n for n in graph.nodes if n in storage.members and n in known]
        if members:  # a value that is written into later reaches what is written
            furthest = known[max(members, key=lambda n: known[n].reached)]
            known.update(dict.fromkeys((n for n in storage.members if has_float32(n)), furthest))
    too_far: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if value(node) is not None and not tensors(node):
            continue  # it reads a size
        why = next(_reasons(node, measured, known, op_list, limit), None)
        if why is not None:
            too_far[node] = why
    return Reach(too_far, frozenset(n for n, k in known.items() if k.reached > limit.largest))


def _own(
    node: fx.Node,
    measured: Mapping[fx.Node, float],
    held: Mapping[str, float],
    known: Mapping[fx.Node, _Known],
    op_list: OpList,
) -> _Known | None:
    if node.op == "get_attr" and str(node.target) in held:
        number = held[str(node.target)]
        return _Known(number, f"{node.target} holds {number:.3g}")
    if node in measured:
        return _Known(measured[node], f"{node.name} reached {measured[node]:.3g} on the calibration data")
    rule = op_list.rule(op_name(node))
    if rule is None or rule.category is not Category.CLEAR or not has_float32(node):
        return None
    sources = [known[u.node] for u in uses(node) if u.node in known]
    return max(sources, key=lambda k: k.reached, default=None)


def _reasons(
    node: fx.Node,
    measured: Mapping[fx.Node, float],
    known: Mapping[fx.Node, _Known],
    op_list: OpList,
    limit: Limit,
) -> Iterator[str]:
    own = measured.get(node, 0.0)
    if limit.passed(own):
        yield f"its output reached {own:.3g} on the calibration data, {limit.shown(own)}"
    kept = op_list.kept(op_name(node))
    for use in uses(node):
        found = known.get(use.node)
        if found is None or use.argument in kept or use.argument.endswith("mask"):
            continue
        if limit.passed(found.reached):
            yield f"its input {found.words}, {limit.shown(found.reached)}"
