"""The decisions on every node of one graph, and the reasons: plain data, to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autocastfx.errors import KeyPath, Place, Source
from autocastfx.plan.cause import Cause
from autocastfx.plan.json_text import parsed_json
from autocastfx.plan.sensitivity import Signature
from autocastfx.policy.rule import Category

__all__ = [
    "NO_SOURCE",
    "UNLISTED",
    "Decision",
    "Forced",
    "Placement",
    "Plan",
    "PlannedCast",
    "PlannedCopy",
    "PlannedNode",
    "Precision",
    "Recomposed",
    "Traffic",
    "check_version",
]


_VERSION = 1  # of the text of a plan: another one for every change that an older reader would misread


class Precision(str, Enum):
    """The dtype that a port's float32 values take."""

    LOW = "low"  # the 16-bit dtype of the conversion
    FLOAT32 = "float32"
    CAPTURED = "captured"  # no float32 value is at stake: whatever the captured graph has
    GIVEN = "given"  # whatever dtypes the inputs have, as torch.autocast runs what it does not list

    def __str__(self) -> str:
        return self.value

    @property
    def in_words(self) -> str:
        """The precision in a sentence, after ``runs`` or ``stored``."""
        words = {Precision.LOW: "in 16 bits", Precision.FLOAT32: "in float32", Precision.CAPTURED: "as captured"}
        return words.get(self, "in the dtypes of its inputs")


class Forced(str, Enum):
    """A rule that decides a node whatever op lists say."""

    CONSTANT = "forced:constant"  # a number in the graph is beyond the dtype's range
    WIDE = "forced:wide"  # it reads values beyond the dtype's range
    EPSILON = "forced:epsilon"  # a small number would become zero
    USER_CAST = "forced:user-cast"  # the model casts here itself
    DTYPE = "forced:dtype"  # the call names a dtype
    NO_KERNEL = "forced:no-kernel"  # the device has no 16-bit kernel
    RANGE = "forced:range"  # measured values do not fit
    WHOLE = "forced:whole"  # whole numbers that 16 bits do not tell apart
    DISTANCE = "forced:distance"  # a small difference of large values, and its products
    UPDATE = "forced:update"  # it computes the next contents of a buffer
    NOT_FLOAT32 = "eligibility"  # no float32 value is at stake
    STAYS_LOW = "forced:stays-low"  # of a 16-bit model: it cannot be raised to float32
    SUB_GRAPH = "sub-graph"  # values cross a sub-graph's border as captured

    def __str__(self) -> str:
        return self.value


_FORCED: Mapping[str, Forced] = {forced.value: forced for forced in Forced}
UNLISTED = KeyPath("unlisted")  # the source of a decision on an op that no list names
NO_SOURCE = KeyPath("list")  # of one by a rule that was made in Python, with no place of its own


@dataclass(frozen=True)
class Decision:
    """The category that a list or a forced rule gives a node, with the reason.

    ``source`` is the place of the list's rule, printed as ``file:line:column``, or the forced rule.
    """

    category: Category
    reason: str
    source: Place | Forced

    def __str__(self) -> str:
        return f"{self.category}, {self.reason or 'no reason given'} ({self.source})"


@dataclass(frozen=True)
class Placement:
    """The precision that a node runs in (its inputs) and the one that its output is stored in, and why.

    ``as_stored`` names the arguments that it takes in whatever precision they are stored.
    """

    run: Precision
    store: Precision
    because: Cause
    as_stored: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """The precisions in a sentence, after ``runs``."""
        return self.run.in_words + (f" and is stored {self.store.in_words}" if self.store is not self.run else "")


@dataclass(frozen=True)
class PlannedNode:
    """One node of the captured graph with all that was decided of it.

    ``captured`` and ``dtype`` are the dtypes of its output before and after the conversion, joined by commas where it
    has several; empty where it has none. ``name`` of a node in a sub-graph is ``subgraph/name``. ``error`` is the
    relative error of the gradient or the output that its placement is predicted to make; None if none was measured.
    ``effect`` is what it is the size of, to be added up with others'; not in a plan's text.
    """

    name: str
    op: str
    module: str
    decision: Decision
    placement: Placement
    captured: str
    dtype: str
    error: float | None = None
    effect: Signature = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class PlannedCast:
    """A cast that the conversion inserted: of which value, to which dtype, who reads it, and the bytes it moves."""

    name: str
    value: str
    dtype: str
    readers: tuple[str, ...]
    saturates: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class PlannedCopy:
    """A read of a parameter's 16-bit working copy, which is made anew when the parameter has changed, not per call."""

    name: str
    parameter: str
    dtype: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Recomposed:
    """A node that stands for captured ones, or does what they did: by which pattern, and their names."""

    pattern: str
    node: str
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes that the ops and casts of a graph move of what was float32, and that TensorFlow's rule would have moved."""

    moved: int = 0
    moved_simply: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.moved_simply + other.moved_simply)


@dataclass(frozen=True)
class Plan:
    """All decisions and casts of one graph, in graph order, and which of its nodes were written out when captured.

    ``error``: the relative error of the gradient or the output that a measured sensitivity predicts; None without one.
    ``unverified``: made without inputs, so that dtypes and sizes are guesses, until the first call's inputs replace it.
    """

    low: str
    device: str
    op_list: str
    nodes: tuple[PlannedNode, ...]
    casts: tuple[PlannedCast, ...]
    traffic: Traffic = Traffic()
    unverified: bool = False
    recomposed: tuple[Recomposed, ...] = ()
    copies: tuple[PlannedCopy, ...] = ()
    error: float | None = None

    def __str__(self) -> str:
        """The summary in a line; ``repr`` holds everything."""
        runs = Counter(node.placement.run for node in self.nodes)
        said = f"; predicted error: {self.error_in_words}" if self.error is not None else ""
        unlisted = f"; unlisted ops: {', '.join(sorted(self.unlisted))}" if self.unlisted else ""
        return (
            f"{self.low} on {self.device}, op list {self.op_list}; nodes: {runs[Precision.LOW]} in {self.low}, "
            f"{runs[Precision.FLOAT32]} in float32; casts: {len(self.casts)}{unlisted}{said}"
        )

    @property
    def low_unmeasured(self) -> int:
        """The number of nodes in 16 bits that the predicted error leaves out, for they could not be measured."""
        low = (n for n in self.nodes if n.placement.run is Precision.LOW and n.op != "getitem")
        return sum(node.error is None for node in low) if self.error is not None else 0

    @property
    def error_in_words(self) -> str:
        """The predicted error, and what it leaves out; empty if nothing was measured."""
        if self.error is None:
            return ""
        without = f", without {self.low_unmeasured} nodes in {self.low} that were not measured"
        return f"{self.error:.1e}" + (without if self.low_unmeasured else "")

    def __getitem__(self, name: str) -> PlannedNode:
        """The entry of the node called ``name``.

        Raises:
            KeyError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"the plan has no node {name!r}")

    @property
    def unlisted(self) -> dict[str, int]:
        """Number of nodes by op, for ops that no list names and that touch a float32 value."""
        return dict(Counter(n.op for n in self.nodes if n.decision.source == UNLISTED))

    def by_op(self) -> dict[tuple[str, str], int]:
        """Number of nodes by (op, precision they run in), ops that touch no float32 value left out."""
        computing = (n for n in self.nodes if n.placement.run is not Precision.CAPTURED)
        return dict(Counter((n.op, str(n.placement.run)) for n in computing))

    def to_json(self) -> str:
        """This plan as JSON text; :meth:`from_json` reads it back."""
        data: dict[str, Any] = {"version": _VERSION, **dataclasses.asdict(self)}
        for entry, node in zip(data["nodes"], self.nodes, strict=True):
            entry["decision"]["source"] = str(node.decision.source)
            entry["placement"]["because"] = str(node.placement.because)
            del entry["effect"]
            if node.error is None:  # as in plans of earlier versions
                del entry["error"]
        if self.error is None:
            del data["error"]
        return json.dumps(data, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote. Text from before plans had a version is read, too.

        Raises:
            ValueError: the text is no such JSON, or was written by a later autocastfx.
        """
        try:
            data: dict[str, Any] = parsed_json(text)
            check_version(data.pop("version", _VERSION))
            nodes = tuple(_node(n) for n in data.pop("nodes"))
            casts = tuple(_cast(c) for c in data.pop("casts"))
            recomposed = tuple(_recomposed(r) for r in data.pop("recomposed", ()))
            rest: dict[str, Any] = {**data, "copies": tuple(_copy(c) for c in data.pop("copies", ()))}
            rest["traffic"] = Traffic(**data.pop("traffic"))
            return cls(nodes=nodes, casts=casts, recomposed=recomposed, **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a plan written by to_json: {error!r}") from None


def check_version(version: object) -> None:
    """Accept the version of a plan's text.

    Raises:
        ValueError: this autocastfx cannot read it.
    """
    if version != _VERSION:
        raise ValueError(
            f"this plan has version {version!r}, and this autocastfx reads version {_VERSION}: convert the model again "
            "to write one, or use the autocastfx that wrote it"
        )


def _source(text: str) -> Place | Forced:
    """The source whose text is ``text``."""
    if text in _FORCED:
        return _FORCED[text]
    place = re.fullmatch(r"(.+):(\d+):(\d+)", text)
    return Source(place[1], int(place[2]), int(place[3])) if place is not None else KeyPath(*text.split(":", 1))


def _node(data: dict[str, Any]) -> PlannedNode:
    decided, placed = data["decision"], data["placement"]
    decision = Decision(Category(decided["category"]), decided["reason"], _source(decided["source"]))
    as_stored, because = tuple(placed.get("as_stored", ())), Cause.from_text(placed["because"])
    placement = Placement(Precision(placed["run"]), Precision(placed["store"]), because, as_stored)
    rest: dict[str, Any] = {**data, "decision": decision, "placement": placement}
    return PlannedNode(**rest)


def _recomposed(data: dict[str, Any]) -> Recomposed:
    rest: dict[str, Any] = {**data, "replaced": tuple(data["replaced"])}
    return Recomposed(**rest)


def _copy(data: dict[str, Any]) -> PlannedCopy:
    rest: dict[str, Any] = {**data, "readers": tuple(data["readers"])}
    return PlannedCopy(**rest)


def _cast(data: dict[str, Any]) -> PlannedCast:
    rest: dict[str, Any] = {**data, "readers": tuple(data["readers"])}
    return PlannedCast(**rest)
