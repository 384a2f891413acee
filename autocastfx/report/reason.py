"""Why a node runs in the precision that it runs in, in words, and what edit would change it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autocastfx.plan.plan import Forced, PlannedNode, Precision
from autocastfx.report.row import Row

__all__ = ["Reason", "Reasons"]

_AFTER = "after "
_SHARES = "shares storage that stays float32"
# What a person can do about a rule that no list overrides.
_ADVICE = {
    Forced.CONSTANT: "the number stands in the model's code: use a smaller one there",
    Forced.WIDE: "the values it reads are too large for the dtype: scale them in the model, or use bfloat16",
    Forced.EPSILON: "the number stands in the model's code: use a larger one there, or bfloat16",
    Forced.USER_CAST: "the model casts here itself: remove the cast in the model",
    Forced.DTYPE: "the call names its dtype itself: remove that in the model",
    Forced.NO_KERNEL: "the device cannot run it in 16 bits: nothing but another device changes it",
    Forced.RANGE: "what was measured comes too near to the dtype's maximum: give convert a smaller headroom=, or use "
    "bfloat16",
    Forced.WHOLE: "the numbers are too large for 16 bits to tell them apart: scale them in the model, or let it "
    "run: low in an edited plan",
    Forced.DISTANCE: "compute the distance without its squares in the model (torch.cdist), or let it run: low in an "
    "edited plan",
    Forced.UPDATE: "a buffer takes what is computed here, in float32: let it run: low in an edited plan",
    Forced.NOT_FLOAT32: "only float32 values are ever cast: there is none here, or it is made here",
    Forced.SUB_GRAPH: "values cross the border of a sub-graph as captured: nothing changes it",
}


@dataclass(frozen=True)
class Reason:
    """Of one node.

    Attributes:
        runs: the precision, and what brought it there.
        decided: category, reason and rule; empty, as are the next two, where no float32 value is at stake.
        placed: what around the node led to its precision, a clause each.
        change: what edit would change it.
    """

    runs: str
    decided: str = ""
    placed: tuple[str, ...] = ()
    change: str = ""


class Reasons:
    """The reasons of the nodes of one graph."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.name: row for row in rows}
        self._known = {row.name: row.planned for row in rows if row.planned is not None}
        self._sources = {row.name: self._behind_casts(row) for row in rows}
        self._readers: dict[str, list[str]] = {row.name: [] for row in rows}
        for row in rows:
            if row.kind in ("op", "output"):
                for source in self._sources[row.name]:
                    self._readers[source].append(row.name)

    def of(self, node: PlannedNode) -> Reason:
        """The reason of a planned node of the graph."""
        if node.placement.run is Precision.CAPTURED:
            return Reason(f"runs as captured: {node.decision.reason}")
        runs = f"runs {self._rows[node.name].precisions}: {node.placement.because}"
        return Reason(runs, _decision(node), tuple(self._placed(node)), self._advice(node))

    def _placed(self, node: PlannedNode) -> Iterator[str]:
        because, known = node.placement.because, self._known
        if because.startswith(_AFTER):
            cause = because.removeprefix(_AFTER)
            if cause in known:
                through = self._through(self._path(cause, node.name))
                yield f"{cause} ({known[cause].op}) is {_decision(known[cause])}; reached {through}"
            else:
                yield f"it computes the next contents of {cause}, which stays float32"
        elif because == _SHARES:
            yield "all that shares memory has one precision, and this memory is float32"
        elif because in ("fewest bytes moved", "an input is float32", "no allow op before it", "folded"):
            yield f"it reads {self._around(self._sources[node.name])}"
            yield f"it is read by {self._around(self._readers[node.name])}"

    def _through(self, path: Sequence[str]) -> str:
        between = [f"{name} ({self._known[name].decision.category})" for name in path if name in self._known]
        return f"through {', '.join(between)}" if between else "directly"

    def _around(self, names: Sequence[str]) -> str:
        said = [f"{name} ({_kind(self._rows[name])})" for name in names]
        return ", ".join(said[:6]) + (f" and {len(said) - 6} more" if len(said) > 6 else "") if said else "nothing"

    def _behind_casts(self, row: Row) -> list[str]:
        """What a node reads, behind the casts that the conversion made."""
        found: dict[str, None] = {}
        for read in row.reads:
            while self._rows[read].kind in ("cast", "copy", "made") and self._rows[read].reads:
                read = self._rows[read].reads[-1]
            found[read] = None
        return list(found)

    def _path(self, start: str, end: str) -> list[str]:
        """The nodes between ``start`` and ``end`` on a shortest way along the graph; nothing if there is none."""
        came: dict[str, str] = {end: ""}
        queue = deque([end])
        while queue and start not in came:
            name = queue.popleft()
            for source in self._sources[name]:
                if source not in came:
                    came[source] = name
                    queue.append(source)
        path, name = list[str](), came.get(start, "")
        while name and name != end:
            path.append(name)
            name = came[name]
        return path

    def _advice(self, node: PlannedNode) -> str:
        because, source = node.placement.because, node.decision.source
        wanted = "float32" if node.placement.run is Precision.LOW else "low"
        ways = [f"let it run: {wanted} in an edited plan, convert(plan=...)"]
        if node.module:
            ways.insert(0, f"under modules: a rule {{path: {node.module}, category: {wanted}}}")
        if isinstance(source, Forced):
            return _ADVICE[source]
        if because == _SHARES:
            return "give what it writes into 16 bits in the model"
        cause = self._known.get(because.removeprefix(_AFTER)) if because.startswith(_AFTER) else None
        if cause is not None and isinstance(cause.decision.source, Forced):
            advice = _ADVICE[cause.decision.source]
            return f"{cause.name} draws it to float32, and {advice}; or {'; or '.join(ways)}"
        if cause is not None:
            ways.insert(0, f"{cause.op}, which draws it to float32, under infer: or allow:")
        category = "deny" if wanted == "float32" else "allow"
        return f"in a list of your own {node.op} under {category}:; or {'; or '.join(ways)}"


def _decision(node: PlannedNode) -> str:
    decision = node.decision
    return f"{decision.category}, {decision.reason or 'no reason given'} ({decision.source})"


def _kind(row: Row) -> str:
    return row.precisions if row.planned is not None else row.kind
