"""A plan that a person edited and gives to a conversion: read, laid over what the lists say, and checked.

A line of the plan is for the node with the same name and op (and module, if the line has one), in every variant with
such a node. A line that differs from the lists' decision is an edit:

- another ``placement``: the node runs, and its output is stored, in that precision;
- only another category: it decides the node as if a list had said it.

The other lines hold their nodes where they are, so that an edit moves nothing else. Nodes without a line are decided as
usual. The casts of the file are not read; they follow from the placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autocastfx.errors import Place, PlanError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_member, module_path
from autocastfx.plan.cause import Cause, Why
from autocastfx.plan.plan import Decision, Placement, Plan, PlannedNode, Precision
from autocastfx.policy.rule import Category
from autocastfx.policy.yaml_tree import nearest

__all__ = ["EditedPlan", "Line", "Obeyed"]

_SHOWN = 20  # lines that one warning lists


@dataclass(frozen=True)
class Line:
    """A plan's line on one node; None for what it leaves out."""

    name: str
    op: str
    source: Place
    module: str | None = None
    category: Category | None = None
    reason: str = ""
    run: Precision | None = None
    store: Precision | None = None

    def speaks_of(self, op: str, module: str) -> bool:
        """True if the line is about a node of this op and module."""
        return self.op == op and self.module in (None, module)

    def moves(self, placement: Placement) -> bool:
        """True if it asks for another precision than ``placement``."""
        run = self.run or placement.run
        return (run, self.store or run) != (placement.run, placement.store)


@dataclass(frozen=True)
class EditedPlan:
    """The lines of a plan, by the names of their nodes."""

    lines: Mapping[str, Line]
    name: str

    def obey(
        self,
        decisions: Mapping[fx.Node, Decision],
        usual: Mapping[fx.Node, Placement],
        unable: Mapping[fx.Node, str],
        prefix: str = "",
    ) -> Obeyed:
        """Lay the plan over the decisions for one graph.

        Args:
            decisions: what the lists say.
            usual: the placements that follow from them.
            unable: why nodes cannot run low, for those that cannot.
            prefix: of the names of the graph's nodes in the plan.

        Raises:
            PlanError: a line asks for what cannot be.
        """
        lines: dict[fx.Node, Line] = {}
        pinned = dict(decisions)
        for node, decision in decisions.items():
            line = self.lines.get(prefix + node.name)
            if line is None or not line.speaks_of(op_name(node), module_path(node)):
                continue
            lines[node] = line
            if not is_member(node):  # it takes the precision of the op that made its tuple
                pinned[node] = _pinned(line, decision, usual[node], unable.get(node))
        return Obeyed(lines, decisions, usual, pinned)

    def unmatched(self, plans: Iterable[Plan]) -> str:
        """A sentence on the lines that speak of no node of ``plans``; empty if each does."""
        found: dict[str, list[PlannedNode]] = {}
        for plan in plans:
            for node in plan.nodes:
                found.setdefault(node.name, []).append(node)
        left = [
            line
            for line in self.lines.values()
            if not any(line.speaks_of(node.op, node.module) for node in found.get(line.name, ()))
        ]
        if not left:
            return ""
        said = [f"{line.source}: {_why_unmatched(line, found)}" for line in left[:_SHOWN]]
        more = f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        return f"lines of the plan {self.name} speak of no node of the model: {'; '.join(said)}{more}."


def _why_unmatched(line: Line, found: Mapping[str, list[PlannedNode]]) -> str:
    same = found.get(line.name)
    if not same:
        return f"no node is named {line.name!r}{nearest(line.name, found)}"
    if same[0].op != line.op:
        return f"{line.name!r} is {same[0].op}, not {line.op}"
    return f"{line.name!r} is in module {same[0].module!r}, not {line.module!r}"


def _pinned(line: Line, decision: Decision, usual: Placement, unable: str | None) -> Decision:
    """The decision from which the asked placement follows. ``keep`` is float32 and draws nobody along."""
    if line.moves(usual):
        if Precision.CAPTURED in (usual.run, line.run):
            said = "holds no float32 value" if usual.run is Precision.CAPTURED else "runs 'low' or 'float32'"
            raise PlanError(f"node {line.name!r} {said}, so it cannot run {str(line.run)!r}.", line.source)
        low = Precision.LOW in (line.run, line.store)
        _refuse(line, unable if low else None)
        return _edited(line, Category.ALLOW if line.run is Precision.LOW else Category.KEEP, decision)
    if line.category is None or line.category is decision.category:
        pins = {Precision.LOW: Category.ALLOW, Precision.FLOAT32: Category.KEEP}
        return replace(decision, category=pins.get(usual.run, decision.category))
    if line.category is Category.BAN:
        raise PlanError(f"a plan cannot ban a node, as it does {line.name!r}; an op list can.", line.source)
    _refuse(line, unable if line.category not in (Category.DENY, Category.KEEP) else None)
    return _edited(line, line.category, decision)


def _edited(line: Line, category: Category, usual: Decision) -> Decision:
    reason = line.reason if line.reason not in ("", usual.reason) else "the plan says so"
    return Decision(category, reason, line.source)


def _refuse(line: Line, unable: str | None) -> None:
    if unable is not None:
        raise PlanError(
            f"node {line.name!r} ({line.op}) cannot run in 16 bits: {unable}. Leave its line as it was.", line.source
        )


@dataclass(frozen=True)
class Obeyed:
    """A plan laid over the decisions for one graph. ``pinned`` is to be placed instead of them."""

    lines: Mapping[fx.Node, Line]
    decisions: Mapping[fx.Node, Decision]
    usual: Mapping[fx.Node, Placement]
    pinned: Mapping[fx.Node, Decision]

    def result(
        self, placements: Mapping[fx.Node, Placement]
    ) -> tuple[dict[fx.Node, Decision], dict[fx.Node, Placement]]:
        """The decisions and placements to record, from the placements of ``pinned``.

        Raises:
            PlanError: a line is not obeyed.
        """
        decided, placed = dict(self.decisions), dict(placements)
        for node, line in self.lines.items():
            usual, now = self.usual[node], placements[node]
            if line.moves(usual):
                _check(line, now)
                decided[node] = self.decisions[node] if is_member(node) else self.pinned[node]
                placed[node] = Placement(now.run, now.store, Cause(Why.EDITED))
            elif is_member(node):
                placed[node] = usual if (now.run, now.store) == (usual.run, usual.store) else now
            elif line.category in (None, self.decisions[node].category):
                _check(line, now, usual)
                placed[node] = usual
            else:
                decided[node] = self.pinned[node]
        return decided, placed


def _check(line: Line, now: Placement, usual: Placement | None = None) -> None:
    run = line.run or (usual.run if usual is not None else now.run)
    store = line.store or (usual.store if usual is not None and line.run is None else run)
    if (now.run, now.store) == (run, store):
        return
    raise PlanError(
        f"node {line.name!r} ({line.op}) cannot run {run} and be stored {store}: with the other lines of the plan "
        f"it runs {now.run} and is stored {now.store} ({now.because}). What shares memory with it, or is taken out of "
        "it, has to be changed alike.",
        line.source,
    )
