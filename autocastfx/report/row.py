"""One line of a rendering: a node of a converted graph with all that is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PureWindowsPath

from autocastfx.errors import Source
from autocastfx.graph.node import Origin
from autocastfx.plan.plan import Decision, Forced, PlannedCast, PlannedCopy, PlannedNode, Precision
from autocastfx.report.source_line import SourceLine

__all__ = ["Row"]

_CASTS = ("to", "_to_copy", "type_as")


@dataclass(frozen=True)
class Row:
    """One node.

    Attributes:
        name: as in the plan: that of a node in a sub-graph is ``subgraph/name``.
        kind: ``input``, ``parameter``, ``buffer``, ``constant``, ``sub-graph``, ``op``, ``cast`` (by the conversion),
            ``copy`` (the conversion's read of a working copy), ``made`` (by the conversion, neither), ``removed`` (in
            the plan, not in the graph) or ``output``.
        op: op name; of a parameter, buffer, constant or sub-graph its path.
        dtype: as captured and, where that changed, after an arrow as it is now. Empty where nothing says it.
        depth: how many graphs are around the node's own.
        reads: names of the rows that it reads, each once.
        runs: names of the sub-graphs that it runs, for which there are rows.
        planned, cast, copy, mark: what the plan and the node itself say, where they say anything.
        line: of the model's code that made it, where that is known.
        shape: the value's shape, as in :class:`~autocastfx.report.shape.Shapes`. Empty if the value is not a tensor, or
            if the shape is unknown: in an unpickled graph only parameters, buffers and constants have one.
        attributes: the op's constant arguments, each with its name: ``("dim", "-1")``.
        bytes: the value's bytes for the sizes of the example inputs; 0 where the shape is empty.
        low_reads: the rows that a float32 op reads in 16 bits, for its kernel computes in float32 inside.
    """

    name: str
    kind: str
    op: str = ""
    dtype: str = ""
    depth: int = 0
    reads: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    planned: PlannedNode | None = None
    cast: PlannedCast | None = None
    copy: PlannedCopy | None = None
    mark: Origin | None = None
    line: SourceLine | None = None
    shape: str = ""
    bytes: int = 0
    attributes: tuple[tuple[str, str], ...] = ()
    low_reads: tuple[str, ...] = ()

    @property
    def precision(self) -> Precision:
        """The precision that an op runs in; ``captured`` for every other row."""
        return self.planned.placement.run if self.planned is not None else Precision.CAPTURED

    @property
    def precisions(self) -> str:
        """The precision that an op runs in, in words, with that of its storage where it is another."""
        if self.planned is None:
            return ""
        run, store = self.planned.placement.run, self.planned.placement.store
        return str(run) if run is store else f"{run}, stored {store}"

    @property
    def decision(self) -> Decision | None:
        """The decision; its source is the same on every machine, for an absolute path is cut to the file's name."""
        found = self.planned.decision if self.planned is not None else None
        if found is None or not isinstance(found.source, Source):
            return found
        path = PureWindowsPath(found.source.file)  # splits at both kinds of slash
        return replace(found, source=replace(found.source, file=path.name)) if path.root else found

    @property
    def is_own_cast(self) -> bool:
        """True for a cast that the captured model makes itself."""
        if self.planned is None:
            return False
        source = self.planned.decision.source
        return source == Forced.USER_CAST or (source == Forced.NOT_FLOAT32 and self.op in _CASTS)
