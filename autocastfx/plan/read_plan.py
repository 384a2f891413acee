"""The text of a plan, as ``Plan.to_json`` writes it and a person edits it, as lines that know their place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from autocastfx.errors import KeyPath, Place, PlanError, Source
from autocastfx.files import read_whole
from autocastfx.plan.edited_plan import EditedPlan, Line
from autocastfx.plan.json_text import parsed_json
from autocastfx.plan.plan import Decision, Placement, Plan, PlannedNode, Precision, check_version
from autocastfx.policy.rule import Category
from autocastfx.policy.yaml_tree import nearest

__all__ = ["read_plan"]


def read_plan(plan: Plan | str | Path) -> EditedPlan:
    """The lines of a plan, or of a file with the text of ``Plan.to_json``, edited or not.

    A line of the file needs ``name`` and ``op``; what it leaves out of ``decision`` and ``placement`` it does not ask
    for. Whole lines may be left out, too.

    Raises:
        PlanError: the file cannot be read; the message starts with file:line:column.
    """
    if isinstance(plan, Plan):
        lines = (_of_node(n, KeyPath("plan").key("nodes").index(i)) for i, n in enumerate(plan.nodes))
        return EditedPlan(_by_name(lines), f"of {plan.op_list} for {plan.low} on {plan.device}")
    if not isinstance(plan, (str, Path)):
        raise TypeError(f"a plan is a Plan or the path of its text, not a {type(plan).__name__}")
    file = str(plan)
    try:
        text = read_whole(Path(plan))
    except OSError as error:
        raise PlanError(f"cannot read the plan {file}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"this is not UTF-8 text: {error.reason}.", Source(file, 1, 1)) from None
    return EditedPlan(_by_name(_parsed(text, file)), file)


def _by_name(lines: Iterable[Line]) -> dict[str, Line]:
    found: dict[str, Line] = {}
    for line in lines:
        if line.name in found:
            raise PlanError(
                f"node {line.name!r} has two lines, the first at {found[line.name].source}. Keep one.", line.source
            )
        found[line.name] = line
    return found


def _of_node(node: PlannedNode, source: Place) -> Line:
    return Line(
        name=node.name,
        op=node.op,
        source=source,
        module=node.module,
        category=node.decision.category,
        reason=node.decision.reason,
        run=node.placement.run,
        store=node.placement.store,
    )


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
    for offset, value in _members(text):
        before = text[:offset]
        yield _line(value, Source(file, before.count("\n") + 1, offset - before.rfind("\n")))


def _members(text: str) -> Iterator[tuple[int, Any]]:
    """The members of ``nodes`` in the text of a JSON object, with their offsets. The text is known to be right."""
    decoder, space = json.JSONDecoder(), re.compile(r"[\s,:]*")

    def after(offset: int) -> int:
        found = space.match(text, offset)
        return found.end() if found else offset

    at, last = after(after(0) + 1), list[tuple[int, Any]]()
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = after(at)
        if key != "nodes":
            at = after(decoder.raw_decode(text, at)[1])
            continue
        at, last = after(at + 1), []
        while text[at] != "]":
            value, end = decoder.raw_decode(text, at)
            last.append((at, value))
            at = after(end)
        at = after(at + 1)
    yield from last


Word = TypeVar("Word", bound=Enum)


def _line(data: Any, source: Source) -> Line:
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
    )


_NAMES = {Plan: "a plan", PlannedNode: "a node", Decision: "a decision", Placement: "a placement"}


def _known(data: Any, kind: type, source: Source) -> None:
    what, keys = _NAMES[kind], [field.name for field in fields(kind) if field.compare]
    if not isinstance(data, dict):
        raise PlanError(f"{what} is an object with keys, not {json.dumps(data)[:40]}.", source)
    for key in (k for k in data if k not in keys):
        raise PlanError(f"{key!r} is no key of {what}{nearest(key, keys)}. Known: {', '.join(keys)}.", source)


def _word(kind: type[Word], data: Mapping[str, Any], key: str, source: Source) -> Word | None:
    value = data.get(key)
    words = [str(member.value) for member in kind]
    if value is None:
        return None
    if value not in words:
        raise PlanError(f"{key!r} is {' or '.join(words)}, not {value!r}{nearest(str(value), words)}.", source)
    return kind(value)
