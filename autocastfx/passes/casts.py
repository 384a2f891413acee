"""Put the casts into a graph that its placements ask for, whichever way they were found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.node import Origin, Use, map_uses, origin, place_like, set_origin, uses
from autocastfx.passes.analysis.backward_adds import Readers
from autocastfx.runtime.operators.casts import saturating_cast

_TO = torch.ops.aten.to.dtype


class PlannedDtypes(ABC):
    """The dtypes that placements ask for: of each value that is read, and of each result."""

    @abstractmethod
    def read(self, node: fx.Node, use: Use, source: fx.Node) -> torch.dtype | None:
        """The dtype in which ``node`` reads the captured ``source`` at ``use``; None for the one it is stored in."""

    @abstractmethod
    def gives(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """The dtypes of the values that ``node`` computes."""

    def stores(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """The dtypes in which its values are kept for whoever takes them as they are stored."""
        return self.gives(node)


_FEW = Readers()


def _no_bound(_: fx.Node, __: torch.dtype) -> float | None:
    return None


@dataclass(frozen=True)
class CastStyle:
    """How casts are made.

    Attributes:
        made_by: the pass, for the marks of the casts.
        low: the 16-bit dtype.
        written: values that are written into, and cast anew for each reader.
        bound: the magnitude at which a cast of a value to a dtype saturates finite numbers; None for a plain cast.
        readers: how many gradients each reader of a cast gives it: more than may be added up get a cast of their own.
        for_each: one cast for each reader, in the order in which torch.autocast makes them; else one for all.
        once: ``get_attr`` targets whose cast to ``low`` is made once even so, each with a number that tied ones share.
    """

    made_by: str
    low: torch.dtype
    written: Set[fx.Node] = frozenset()
    bound: Callable[[fx.Node, torch.dtype], float | None] = _no_bound
    readers: Readers = _FEW
    for_each: bool = False
    once: Mapping[str, int] = field(default_factory=dict)


def insert_casts(graph: fx.Graph, planned: PlannedDtypes, style: CastStyle) -> None:
    """Insert casts into ``graph``, in place, so that each node reads what is planned. Casts of an earlier run stay.

    Args:
        graph: captured, with abstract values.
        planned: the dtypes of its values.
        style: how casts are made.
    """
    run = _Run(graph, planned, style)
    for node in [node for node in graph.nodes if origin(node) is None]:
        run.visit(node)


@dataclass
class _Run:
    graph: fx.Graph
    planned: PlannedDtypes
    style: CastStyle
    casts: dict[object, fx.Node] = field(default_factory=dict[object, fx.Node])
    stored: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])  # value → the cast that holds it
    # value → how many casts its readers had before, and how many gradients those of the last one give it
    shared: dict[fx.Node, tuple[int, float]] = field(default_factory=dict[fx.Node, tuple[int, float]])

    def visit(self, node: fx.Node) -> None:
        numbered = list(enumerate(uses(node)))
        reads = {i: self._read(node, use) for i, use in (_last_first(numbered) if self.style.for_each else numbered)}
        if any(reads[i] is not use.node for i, use in numbered):
            count = iter(range(len(numbered)))
            map_uses(node, lambda _, __: reads[next(count)])
        if node.op != "output" and (store := self.planned.stores(node)) != self.planned.gives(node):
            self.stored[node] = self._cast(node, node, store[0], "storage", before=node.next)

    def _read(self, node: fx.Node, use: Use) -> fx.Node:
        """The value of ``use`` as ``node`` wants it: itself, an earlier cast of it, or a new one."""
        read = use.node
        if origin(read) is not None:
            return read
        holder, to = self.stored.get(read, read), self.planned.read(node, use, read)
        if to is None or self.planned.stores(read) == (to,):
            return holder
        key, rule, before, like = self._kind(read, holder, to, node)
        if key is None or key not in self.casts:
            made = self._cast(read, holder, to, rule, before=before, like=like)
            if key is None:
                return made
            self.casts[key] = made
        return self.casts[key]

    def _kind(
        self, read: fx.Node, holder: fx.Node, to: torch.dtype, reader: fx.Node
    ) -> tuple[object, str, fx.Node, fx.Node]:
        """By what a cast is known to later readers, its rule, where it stands, and whose line it is."""
        if self.style.for_each:
            number = self.style.once.get(str(read.target)) if read.op == "get_attr" and to == self.style.low else None
            return number, "reader" if number is None else "parameter", reader, reader
        if read in self.style.written:  # what this reader sees is what its contents are now
            return (read, to, reader), "mutated", reader, read
        count = self._count(read, reader) if to == self.style.low else 0
        at_reader = count > 0 or read.op in ("placeholder", "get_attr")
        return (read, to, count), "reader", reader if at_reader else holder.next, read

    def _count(self, read: fx.Node, reader: fx.Node) -> int:
        """Which of the casts of ``read`` the reader takes: the last, unless it adds too many gradients to it."""
        count, gradients = self.shared.get(read, (0, 0.0))
        given = self.style.readers.given(reader, read)
        full = gradients > 0 and gradients + given > self.style.readers.most
        self.shared[read] = (count + 1, given) if full else (count, gradients + given)
        return self.shared[read][0]

    def _cast(
        self,
        read: fx.Node,
        holder: fx.Node,
        to: torch.dtype,
        rule: str,
        *,
        before: fx.Node,
        like: fx.Node | None = None,
    ) -> fx.Node:
        bound = self.style.bound(read, to)
        target, args = (_TO, (holder, to)) if bound is None else (saturating_cast, (holder, to, bound))
        with self.graph.inserting_before(before):
            made = self.graph.create_node("call_function", target, args, {}, f"{read.name}_{dtype_name(to)}")
        place_like(made, read if like is None else like)
        set_origin(made, Origin(self.style.made_by, rule, read.name, saturates=bound is not None))
        return made


def _last_first(numbered: Sequence[tuple[int, Use]]) -> Iterator[tuple[int, Use]]:
    """Yield uses in the order in which torch casts them: the last argument first, the members of a list in theirs.

    The order decides in which the gradients of a value that is read twice are added.
    """
    for argument in reversed(dict.fromkeys(use.argument for _, use in numbered)):
        yield from ((i, use) for i, use in numbered if use.argument == argument)
