"""A plan that a person edited and gives to a conversion: read, laid over what the lists say, and checked.

A line of the plan is for the node with the same name and op (and module, if the line has one), in every variant with
such a node. A line that differs from the lists' decision is an edit:

- another ``placement``: the node runs, and its output is stored, in that precision;
- only another category: it decides the node as if a list had said it.

The other lines hold their nodes where they are, so that an edit moves nothing else. Nodes without a line are decided as
usual. The casts of the file are not read; they follow from the placements.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import fx

from autocastfx.errors import ArgumentTypeError, KeyPath, PlanError, Source, TextPlace
from autocastfx.files import json_places, parsed_json, read_whole
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_member, module_path
from autocastfx.plan.plan import Cause, Decision, Placement, Plan, PlannedNode, Precision, Why, check_version
from autocastfx.policy.rule import Category
from autocastfx.policy.yaml_tree import nearest

_SHOWN = 20  # lines that one warning lists


@dataclass(frozen=True)
class Line:
    """A plan's line on one node; None for what it leaves out."""

    name: str
    op: str
    source: TextPlace
    module: str | None = None
    category: Category | None = None
    reason: str = ""
    run: Precision | None = None
    store: Precision | None = None
    in_float8: bool = False

    def speaks_of(self, op: str, module: str) -> bool:
        """True if the line is about a node of this op and module."""
        return self.op == op and self.module in (None, module)

    def moves(self, placement: Placement) -> bool:
        """True if it asks for another precision than ``placement``."""
        run = self.run or placement.run
        return (run, self.store or run) != (placement.run, placement.store)


@dataclass(frozen=True)
class EditedPlan:
    """The lines of a plan, by the names of their nodes, and whether it says what is kept for backward."""

    lines: Mapping[str, Line]
    name: str
    saved: bool = False

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

    def without_float8(self, plans: Iterable[Plan]) -> str:
        """A sentence on the nodes whose lines have products in float8, and that have none in ``plans``; or empty."""
        nodes = [node for plan in plans for node in plan.nodes if not node.products]
        known = ((self.lines.get(node.name), node) for node in nodes)
        lost = {n.name for line, n in known if line is not None and line.in_float8 and line.speaks_of(n.op, n.module)}
        return (
            f"{len(lost)} nodes of the plan {self.name} have products in float8, and here in 16 bits: which products "
            "run in float8 follows from the op list alone. Give the list that the plan was made by, as op_list."
            if lost
            else ""
        )

    def without_saved(self, rules: Collection[object]) -> str:
        """A sentence if the plan says what is kept for backward, and no rules do; or empty."""
        said = (
            f"the plan {self.name} says what is kept for backward, and here all is kept as computed: that follows from "
        )
        end = "saved and the op list alone. Give those that the plan was made by."
        return f"{said}{end}" if self.saved and not rules else ""

    def unmatched(self, plans: Iterable[Plan]) -> str:
        """A sentence on the lines that speak of no node of ``plans``; empty if each does."""
        nodes: dict[str, list[PlannedNode]] = {}
        for plan in plans:
            for node in plan.nodes:
                nodes.setdefault(node.name, []).append(node)
        left = [
            line
            for line in self.lines.values()
            if not any(line.speaks_of(node.op, node.module) for node in nodes.get(line.name, ()))
        ]
        if not left:
            return ""
        said = [f"{line.source}: {_why_unmatched(line, nodes)}" for line in left[:_SHOWN]]
        more = f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        return f"lines of the plan {self.name} speak of no node of the model: {'; '.join(said)}{more}."


def _why_unmatched(line: Line, nodes: Mapping[str, list[PlannedNode]]) -> str:
    same = nodes.get(line.name)
    if not same:
        return f"no node is named {line.name!r}{nearest(line.name, nodes)}"
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
            if line.run or line.store or line.category:
                decided[node] = replace(decided[node], rule=line.source)
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


# The text of a plan, as ``Plan.to_json`` writes it and a person edits it, as lines that know their place.


def read_plan(plan: Plan | str | Path) -> EditedPlan:
    """The lines of a plan, or of a file with the text of ``Plan.to_json``, edited or not.

    A line of the file needs ``name`` and ``op``; what it leaves out of ``decision`` and ``placement`` it does not ask
    for. Whole lines may be left out, too.

    Raises:
        PlanError: the file cannot be read; the message starts with file:line:column.
    """
    if isinstance(plan, Plan):
        nodes = parsed_json(plan.to_json())["nodes"]
        lines = (_line(node, KeyPath("plan").key("nodes").index(i)) for i, node in enumerate(nodes))
        return EditedPlan(_by_name(lines), f"of {plan.op_list} for {plan.low} on {plan.device}", bool(plan.saved))
    if not isinstance(plan, (str, Path)):
        raise ArgumentTypeError(f"a plan is a Plan or the path of its text, not a {type(plan).__name__}")
    file = str(plan)
    try:
        text = read_whole(Path(plan))
    except OSError as error:
        raise PlanError(f"cannot read the plan {file}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"this is not UTF-8 text: {error.reason}.", Source(file, 1, 1)) from None
    return EditedPlan(_by_name(_parsed(text, file)), file, bool(parsed_json(text).get("saved")))


def _by_name(lines: Iterable[Line]) -> dict[str, Line]:
    by_name: dict[str, Line] = {}
    for line in lines:
        if line.name in by_name:
            raise PlanError(
                f"node {line.name!r} has two lines, the first at {by_name[line.name].source}. Keep one.", line.source
            )
        by_name[line.name] = line
    return by_name


def _parsed(text: str, file: str) -> Iterator[Line]:
    try:
        data = parsed_json(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"this is not JSON: {error.msg}.", Source(file, error.lineno, error.colno)) from None
    start = Source(file, 1, 1)
    if isinstance(data, dict) and "version" in data:
        try:
            check_version(data.pop("version"))
        except ValueError as error:
            raise PlanError(f"{error}.", start) from None
    _known(data, Plan, start)
    if not isinstance(data.get("nodes"), list):
        raise PlanError("a plan has the key 'nodes' with a list of nodes.", start)
    places = json_places(text, file, "nodes")
    yield from (_line(value, place) for value, place in zip(data["nodes"], places[1:], strict=True))


Word = TypeVar("Word", bound=Enum)


def _line(data: Any, source: TextPlace) -> Line:
    _known(data, PlannedNode, source)
    for key in ("name", "op"):
        if not isinstance(data.get(key), str):
            raise PlanError(f"this node has no {key!r}, by which it would be found.", source)
    decision, placement = data.get("decision") or {}, data.get("placement") or {}
    _known(decision, Decision, source)
    _known(placement, Placement, source)
    return Line(
        name=data["name"],
        op=data["op"],
        source=source,
        module=data.get("module"),
        category=_word(Category, decision, "category", source),
        reason=str(decision.get("reason", "")),
        run=_word(Precision, placement, "run", source),
        store=_word(Precision, placement, "store", source),
        in_float8=bool((data.get("float8") or {}).get("products")),
    )


_NAMES = {Plan: "a plan", PlannedNode: "a node", Decision: "a decision", Placement: "a placement"}


def _known(data: Any, kind: type, source: TextPlace) -> None:
    what, keys = _NAMES[kind], [field.name for field in fields(kind) if field.compare]
    if not isinstance(data, dict):
        raise PlanError(f"{what} is an object with keys, not {json.dumps(data)[:40]}.", source)
    for key in (key for key in data if key not in keys):
        raise PlanError(f"{key!r} is no key of {what}{nearest(key, keys)}. Known: {', '.join(keys)}.", source)


def _word(kind: type[Word], data: Mapping[str, Any], key: str, source: TextPlace) -> Word | None:
    value = data.get(key)
    words = [str(member.value) for member in kind]
    if value is None:
        return None
    if value not in words:
        raise PlanError(f"{key!r} is {' or '.join(words)}, not {value!r}{nearest(str(value), words)}.", source)
    return kind(value)
