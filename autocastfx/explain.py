"""``explain``: why a node runs in the precision that it runs in, in words, and what edit would change it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from autocastfx.amp_module import AmpModule
from autocastfx.dump import view_of
from autocastfx.plan import PlannedNode, Precision
from autocastfx.report.row import Row
from autocastfx.selection import select

__all__ = ["explain"]

_AFTER = "after "
_SHARES = "shares storage that stays float32"
# What a person can do about a rule that no list overrides.
_FORCED = {
    "forced:constant": "the number stands in the model's code: use a smaller one there",
    "forced:wide": "the values it reads are too large for the dtype: scale them in the model, or use bfloat16",
    "forced:epsilon": "the number stands in the model's code: use a larger one there, or bfloat16",
    "forced:user-cast": "the model casts here itself: remove the cast in the model",
    "forced:dtype": "the call names its dtype itself: remove that in the model",
    "forced:no-kernel": "the device cannot run it in 16 bits: nothing but another device changes it",
    "forced:range": "what was measured comes too near to the dtype's maximum: give convert a smaller headroom=, or use "
    "bfloat16",
    "eligibility": "only float32 values are ever cast: there is none here, or it is made here",
    "sub-graph": "values cross the border of a sub-graph as captured: nothing changes it",
}


def explain(amp_model: AmpModule, what: str) -> str:
    """Why the nodes that ``what`` names run in the precision that they run in, and what would change it.

    Args:
        amp_model: what ``convert`` returned. The variant that its ``plan`` shows is explained.
        what: a node, an op, a module, or an op inside a module; paths may be patterns (``layers.*.attn.softmax``).

    Returns:
        A paragraph for each node; nodes that no float32 value touches are only named.

    Raises:
        KeyError: nothing in the plan is called so; with the nearest name.
        TypeError: ``amp_model`` is no converted model.
        VariantError: nothing is captured yet.
    """
    if not isinstance(amp_model, AmpModule):
        raise TypeError(
            f"explain speaks of what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    shown = view_of(amp_model)
    rows = {row.name: row for row in shown.rows}
    known = {name: row.planned for name, row in rows.items() if row.planned is not None}
    found = select(shown.plan, what)
    return "\n".join(paragraph for node in found for paragraph in ("\n".join(_lines(node, rows, known)), ""))


def _lines(node: PlannedNode, rows: Mapping[str, Row], known: Mapping[str, PlannedNode]) -> Iterator[str]:
    head = f"{node.name} ({node.op}) in module {node.module or '(root)'}"
    if node.placement.run is Precision.CAPTURED:
        yield f"{head} runs as captured: {node.decision.reason}."
        return
    row = rows[node.name]
    yield f"{head} runs {row.precisions}: {node.placement.because}."
    yield f"  decided: {_decision(node)}."
    for line in _placed(node, rows, known):
        yield f"  placed: {line}."
    yield f"  to change it: {_advice(node, known)}."


def _decision(node: PlannedNode) -> str:
    decision = node.decision
    return f"{decision.category}, {decision.reason or 'no reason given'} ({decision.source})"


def _placed(node: PlannedNode, rows: Mapping[str, Row], known: Mapping[str, PlannedNode]) -> Iterator[str]:
    because = node.placement.because
    if because.startswith(_AFTER):
        cause = because.removeprefix(_AFTER)
        if cause in known:
            path = _path(cause, node.name, rows)
            yield f"{cause} ({known[cause].op}) is {_decision(known[cause])}; reached {_through(path, known)}"
        else:
            yield f"it computes the next contents of {cause}, which stays float32"
    elif because == _SHARES:
        yield "all that shares memory has one precision, and this memory is float32"
    elif because in ("fewest bytes moved", "an input is float32", "no allow op before it", "folded"):
        yield f"it reads {_around(_sources(node.name, rows), rows)}"
        yield f"it is read by {_around(_readers(node.name, rows), rows)}"


def _through(path: Sequence[str], known: Mapping[str, PlannedNode]) -> str:
    between = [f"{name} ({known[name].decision.category})" for name in path if name in known]
    return f"through {', '.join(between)}" if between else "directly"


def _around(names: Sequence[str], rows: Mapping[str, Row]) -> str:
    said = [f"{name} ({_kind(rows[name])})" for name in names]
    return ", ".join(said[:6]) + (f" and {len(said) - 6} more" if len(said) > 6 else "") if said else "nothing"


def _kind(row: Row) -> str:
    return row.precisions if row.planned is not None else row.kind


def _sources(name: str, rows: Mapping[str, Row]) -> list[str]:
    """What a node reads, behind the casts that the conversion made."""
    found: dict[str, None] = {}
    for read in rows[name].reads:
        while rows[read].kind in ("cast", "copy", "made") and rows[read].reads:
            read = rows[read].reads[-1]
        found[read] = None
    return list(found)


def _readers(name: str, rows: Mapping[str, Row]) -> list[str]:
    return [other for other, row in rows.items() if row.kind in ("op", "output") and name in _sources(other, rows)]


def _path(start: str, end: str, rows: Mapping[str, Row]) -> list[str]:
    """The nodes between ``start`` and ``end`` on a shortest way along the graph; nothing if there is none."""
    came: dict[str, str] = {end: ""}
    queue = deque([end])
    while queue and start not in came:
        name = queue.popleft()
        for source in _sources(name, rows):
            if source not in came:
                came[source] = name
                queue.append(source)
    path, name = list[str](), came.get(start, "")
    while name and name != end:
        path.append(name)
        name = came[name]
    return path


def _advice(node: PlannedNode, known: Mapping[str, PlannedNode]) -> str:
    because, source = node.placement.because, node.decision.source
    wanted = "float32" if node.placement.run is Precision.LOW else "low"
    ways = [f"let it run: {wanted} in an edited plan, convert(plan=...)"]
    if node.module:
        ways.insert(0, f"under modules: a rule {{path: {node.module}, category: {wanted}}}")
    if source in _FORCED:
        return _FORCED[source]
    if because == _SHARES:
        return "give what it writes into 16 bits in the model"
    cause = known.get(because.removeprefix(_AFTER)) if because.startswith(_AFTER) else None
    if cause is not None and cause.decision.source in _FORCED:
        return f"{cause.name} draws it to float32, and {_FORCED[cause.decision.source]}; or {'; or '.join(ways)}"
    if cause is not None:
        ways.insert(0, f"{cause.op}, which draws it to float32, under infer: or allow:")
    category = "deny" if wanted == "float32" else "allow"
    return f"in a list of your own {node.op} under {category}:; or {'; or '.join(ways)}"
