"""Finds the nodes of a graph whose values are too large or too small for 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.alias import alias_sets, is_view, is_view_or_copy, reachable
from autocastfx.graph.magnitude import Magnitude, filled, read_as_scores, takes_mask
from autocastfx.graph.names import op_name
from autocastfx.graph.node import Use, has_float32, tensors, uses, value
from autocastfx.passes.analysis.units import listed_category, only_moves
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category

# Attention masks: values that only ever say which scores do not count, however large they are.


@dataclass(frozen=True)
class Fill:
    """A number that a node writes in the place of some elements, and all values that then hold it, or a sum of it."""

    argument: str
    number: float
    reached: frozenset[fx.Node]


def largest_mask(low: torch.dtype) -> float:
    """The largest number that a mask may hold in ``low``: beside a score the sum is yet finite."""
    return float(torch.finfo(low).max) / 2


def fills(graph: fx.Graph, beyond: float) -> dict[fx.Node, Fill]:
    """The nodes that fill in a number larger than ``beyond`` which says alone that a score does not count, or does.

    Whatever reads their values, through views, copies, further fills and additions, is a softmax or an attention mask.
    Any number beyond all scores would do there, if it is the same one wherever two fills meet.
    """
    candidates = {node: given for node in graph.nodes if (given := filled(node)) and beyond < abs(given[1]) < math.inf}
    if not candidates:
        return {}
    written = alias_sets(graph).keys()
    made = {node: read_as_scores(node, written) for node in candidates}
    numbers: dict[fx.Node, set[float]] = {}
    for node, reached in made.items():
        for each in {node, *reached}:  # one that was not followed so far meets those that reach it, too
            numbers.setdefault(each, set()).add(candidates[node][1])
    alone = {node for node, reached in made.items() if reached and all(len(numbers[each]) == 1 for each in reached)}
    return {node: Fill(*candidates[node], made[node]) for node in candidates if node in alone}


def reading_call_inputs(graph: fx.Graph, nodes: Iterable[fx.Node], computed: Set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that read numbers from a call's inputs, directly or through ops, but not through ``computed``.

    Such numbers may be a mask, beyond the range, and narrowed they would be infinite.
    """
    storages = alias_sets(graph) if nodes else {}
    readers: set[fx.Node] = set()

    def is_followed(read: fx.Node) -> bool:
        return read not in computed and any(t.is_floating_point() for t in tensors(read))

    def sources(read: fx.Node) -> Iterator[fx.Node]:
        writers = storages[read].members if read in storages else ()
        return (near for each in (read, *writers) for near in each.all_input_nodes if is_followed(near))

    for node in nodes:
        made_of = reachable((n for n in node.all_input_nodes if is_followed(n)), sources)
        if any(read.op == "placeholder" for read in made_of):
            readers.add(node)
    return readers


def seen_as(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes``, and what shows or copies the numbers of one of them."""
    return set(reachable(nodes, lambda read: (r for r in read.users if is_view_or_copy(r) and tensors(r))))


def is_mask(node: fx.Node) -> bool:
    """True if a value reaches an addition or an attention mask through views alone."""
    views = reachable([node], lambda read: (r for r in read.users if is_view(r) and value(r) is not None))
    pairs = ((read, reader) for read in views for reader in read.users)
    return any(u.node is read and takes_mask(reader, u) for read, reader in pairs for u in uses(reader))


@dataclass(frozen=True)
class Reach:
    """The nodes and values that 16 bits cannot hold.

    Attributes:
        unfit: why a node must run in float32, for those that must.
        wide: values with finite numbers beyond the low dtype's range.
    """

    unfit: Mapping[fx.Node, str]
    wide: frozenset[fx.Node]


@dataclass(frozen=True)
class Limit:
    """The bounds on values in 16 bits.

    Too large is the largest finite number of ``low``, divided by ``headroom``. Too small is a root mean square below
    the smallest normal number: what subnormal numbers round away, half of their spacing, is then more of a value than
    what rounding takes from normal ones.
    """

    low: torch.dtype
    headroom: float = 1.0

    @property
    def largest(self) -> float:
        """The largest finite number of the dtype."""
        return float(torch.finfo(self.low).max)

    @property
    def smallest(self) -> float:
        """The smallest normal number of the dtype."""
        return float(torch.finfo(self.low).smallest_normal)

    def passed(self, reached: float) -> bool:
        """True for a magnitude that is too large."""
        return reached >= self.largest / self.headroom

    def loses(self, magnitude: Magnitude) -> bool:
        """True for a value that is too small. A value of zeros alone is not: 16 bits hold 0."""
        return magnitude.largest > 0 and magnitude.rms < self.smallest

    def shown(self, reached: float) -> str:
        """``reached`` beside the limit that it passed, in words."""
        limit = f"{self._name}'s {self.largest:.5g}"
        return f"beyond {limit}" if reached > self.largest else f"within a factor {self.headroom:g} of {limit}"

    def shown_lost(self) -> str:
        """The limit of a value that is too small, in words."""
        return f"below {self._name}'s smallest normal number {self.smallest:.2g}"

    @property
    def _name(self) -> str:
        return dtype_name(self.low)


@dataclass(frozen=True)
class _Known:
    """A magnitude, and the node that it was known for: the value itself, or one that its elements come from."""

    magnitude: Magnitude
    name: str
    is_held: bool

    def reached(self) -> str:
        """The largest element, in words."""
        if self.is_held:
            return f"{self.name} holds {self.magnitude.largest:.3g}"
        return f"{self.name} reached {self.magnitude.largest:.3g} on the calibration data"

    def typical(self) -> str:
        """The size of most elements, in words."""
        words = f"{self.name} has a root mean square of {self.magnitude.rms:.2g}"
        return words if self.is_held else f"{words} on the calibration data"


def reach(
    graph: fx.Graph,
    measured: Mapping[fx.Node, Magnitude],
    magnitudes: Mapping[str, Magnitude],
    op_list: OpList,
    limit: Limit,
) -> Reach:
    """Find the nodes of ``graph`` that 16 bits cannot serve, from how large their values are known to be.

    A ``clear`` op that was not measured is as large as its inputs. A mask reaches as far as it likes: narrowed, it
    saturates. So may an input that the list keeps in float32. What is added may be small. So may a weight that an
    ``allow`` op reads, unless values were measured: torch.autocast narrows it, too.

    Args:
        graph: captured, with abstract values.
        measured: how large outputs were on calibration data.
        magnitudes: how large what ``get_attr`` nodes read is, by target.
        op_list: names arguments that stay float32, and which ops only move values.
        limit: of the conversion.
    """
    known: dict[fx.Node, _Known] = {}
    for node in graph.nodes:
        own = _own(node, measured, magnitudes, known, op_list)
        if own is not None:
            known[node] = own
    for storage in {id(s): s for s in alias_sets(graph).values()}.values():
        members = [n for n in graph.nodes if n in storage.members and has_float32(n)]
        joined = _joined(members, known)  # a value that is written into later is as large as what is written
        known.update(dict.fromkeys(members, joined) if joined is not None else {})
    unfit: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if value(node) is not None and not tensors(node):
            continue  # it reads a size
        why = next(_reasons(node, measured, known, op_list, limit), None)
        if why is not None:
            unfit[node] = why
    return Reach(unfit, frozenset(n for n, k in known.items() if k.magnitude.largest > limit.largest))


def _own(
    node: fx.Node,
    measured: Mapping[fx.Node, Magnitude],
    magnitudes: Mapping[str, Magnitude],
    known: Mapping[fx.Node, _Known],
    op_list: OpList,
) -> _Known | None:
    if node.op == "get_attr" and str(node.target) in magnitudes:
        return _Known(magnitudes[str(node.target)], str(node.target), is_held=True)
    if node in measured:
        return _Known(measured[node], node.name, is_held=False)
    if not only_moves(node, op_list) or not has_float32(node):
        return None
    return _joined([u.node for u in uses(node) if has_float32(u.node)], known)


def _joined(sources: Sequence[fx.Node], known: Mapping[fx.Node, _Known]) -> _Known | None:
    """The source that reaches furthest, with the largest root mean square of all. An unknown source counts as large."""
    known_sources = [known[n] for n in sources if n in known]
    if not known_sources:
        return None
    furthest = max(known_sources, key=lambda k: k.magnitude.largest)
    rms = max(k.magnitude.rms for k in known_sources) if len(known_sources) == len(sources) else math.inf
    return replace(furthest, magnitude=replace(furthest.magnitude, rms=rms))


def _reasons(
    node: fx.Node,
    measured: Mapping[fx.Node, Magnitude],
    known: Mapping[fx.Node, _Known],
    op_list: OpList,
    limit: Limit,
) -> Iterator[str]:
    own = _Known(measured[node], "its output", is_held=False) if node in measured else None
    if own is not None and limit.passed(own.magnitude.largest):
        yield f"{own.reached()}, {limit.shown(own.magnitude.largest)}"
    kept = op_list.kept(op_name(node))
    reads = [u for u in uses(node) if u.node in known and not (u.argument in kept or u.argument.endswith("mask"))]
    for source in (known[u.node] for u in reads):
        if limit.passed(source.magnitude.largest):
            yield f"its input {source.reached()}, {limit.shown(source.magnitude.largest)}"
    if own is not None and limit.loses(own.magnitude):
        yield f"{own.typical()}, {limit.shown_lost()}"
    narrows = not measured and listed_category(node, op_list) is Category.ALLOW
    for source in (known[u.node] for u in reads if not (narrows or _adds(node, u))):
        if limit.loses(source.magnitude):
            yield f"its input {source.typical()}, {limit.shown_lost()}"


def _adds(node: fx.Node, use: Use) -> bool:
    """True if ``node`` adds this input to another one."""
    return use.argument == "bias" or takes_mask(node, use)
