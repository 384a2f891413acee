"""Attention masks: values that only ever say which scores do not count, however large they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import fx

from autocastfx.graph.alias import alias_sets, is_view, is_view_or_copy, reachable
from autocastfx.graph.magnitude import filled, read_as_scores, takes_mask
from autocastfx.graph.node import tensors, uses, value

__all__ = ["Fill", "come_in", "fills", "fits", "is_mask", "seen_as"]


@dataclass(frozen=True)
class Fill:
    """A number that a node writes in the place of some elements, and all values that then hold it, or a sum of it."""

    argument: str
    number: float
    reached: frozenset[fx.Node]


def fits(low: torch.dtype) -> float:
    """The largest number that a mask may hold in ``low``: beside a score the sum is yet finite."""
    return float(torch.finfo(low).max) / 2


def fills(graph: fx.Graph, beyond: float) -> dict[fx.Node, Fill]:
    """The nodes that fill in a number larger than ``beyond`` which says alone that a score does not count, or does.

    Whatever reads their values, through views, copies, further fills and additions, is a softmax or an attention mask.
    Any number beyond all scores would do there, if it is the same one wherever two fills meet.
    """
    found = {node: given for node in graph.nodes if (given := filled(node)) and beyond < abs(given[1]) < math.inf}
    if not found:
        return {}
    written = alias_sets(graph).keys()
    made = {node: read_as_scores(node, written) for node in found}
    numbers: dict[fx.Node, set[float]] = {}
    for node, reached in made.items():
        for each in reached:
            numbers.setdefault(each, set()).add(found[node][1])
    for node, (_, number) in found.items():  # one that was not followed so far meets those that reach it, too
        numbers.setdefault(node, set()).add(number)
    alone = {node for node, reached in made.items() if reached and all(len(numbers[each]) == 1 for each in reached)}
    return {node: Fill(*found[node], made[node]) for node in found if node in alone}


def come_in(graph: fx.Graph, nodes: Iterable[fx.Node], computed: Set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that read numbers from a call's inputs, directly or through ops, but not through ``computed``.

    Such numbers may be a mask, beyond the range, and narrowed they would be infinite.
    """
    storages = alias_sets(graph) if nodes else {}
    found: set[fx.Node] = set()

    def is_followed(read: fx.Node) -> bool:
        return read not in computed and any(t.is_floating_point() for t in tensors(read))

    def sources(read: fx.Node) -> Iterator[fx.Node]:
        writers = storages[read].members if read in storages else ()
        return (near for each in (read, *writers) for near in each.all_input_nodes if is_followed(near))

    for node in nodes:
        made_of = reachable((n for n in node.all_input_nodes if is_followed(n)), sources)
        if any(read.op == "placeholder" for read in made_of):
            found.add(node)
    return found


def seen_as(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes``, and what shows or copies the numbers of one of them."""
    return set(reachable(nodes, lambda read: (r for r in read.users if is_view_or_copy(r) and tensors(r))))


def is_mask(node: fx.Node) -> bool:
    """True if a value reaches an addition or an attention mask through views alone."""
    views = reachable([node], lambda read: (r for r in read.users if is_view(r) and value(r) is not None))
    pairs = ((read, reader) for read in views for reader in read.users)
    return any(u.node is read and takes_mask(reader, u) for read, reader in pairs for u in uses(reader))
