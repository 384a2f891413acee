"""The decisions on every node of one graph, and the reasons: plain data, to and from JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from autocastfx.errors import ArgumentError, KeyPath, Source, TextPlace, UnknownNameError
from autocastfx.files import Conversions, parsed_json, plain_data, typed_data
from autocastfx.plan.sensitivity import Sensitivity, Signature, added, rms
from autocastfx.policy.float8 import Layout, Product
from autocastfx.policy.rule import Category, Rule, Runs
from autocastfx.policy.saved import Keep
from autocastfx.policy.yaml_tree import nearest


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
    """

    low: str
    device: str
    op_list: str
    nodes: tuple[PlannedNode, ...]
    casts: tuple[PlannedCast, ...]
    traffic: Traffic = Traffic()
    recomposed: tuple[Recomposed, ...] = ()
    copies: tuple[PlannedCopy, ...] = ()
    error: float | None = None
    quantized: tuple[PlannedQuantized, ...] = ()
    saved: tuple[PlannedSaved, ...] = ()

    def __str__(self) -> str:
        """The summary in a line; ``repr`` holds everything."""
        runs = Counter(node.placement.run for node in self.nodes)
        said = f"; predicted error: {self.error_in_words}" if self.error is not None else ""
        unlisted = f"; unlisted ops: {', '.join(sorted(self.unlisted))}" if self.unlisted else ""
        return (
            f"{self.low} on {self.device}, op list {self.op_list}; nodes: {runs[Precision.LOW]} in {self.low}, "
            f"{runs[Precision.FLOAT32]} in float32; casts: {len(self.casts)}{unlisted}{said}"
        )

    def with_inside(self, other: Plan) -> Plan:
        """Return this plan with that of a graph that this one's graph runs, whose names begin with the node's.

        An error is predicted for both or for none: what one of them adds to the other's is not known.
        """
        together = ("nodes", "casts", "recomposed", "copies", "quantized")
        parts = {name: (*getattr(self, name), *getattr(other, name)) for name in together}
        return replace(self, **parts, traffic=self.traffic + other.traffic, error=None)

    @property
    def low_unmeasured(self) -> int:
        """The number of nodes in 16 bits that the predicted error leaves out, for they could not be measured."""
        low = (n for n in self.nodes if n.placement.run is Precision.LOW and n.op != "getitem")
        return sum(node.error is None for node in low) if self.error is not None else 0

    @property
    def float8_unmeasured(self) -> int:
        """The number of nodes with products in float8 that the predicted error leaves out, likewise."""
        in_float8 = (node.float8 for node in self.nodes if node.float8 is not None and node.products)
        return sum(not one.errors for one in in_float8) if self.error is not None else 0

    @property
    def error_in_words(self) -> str:
        """The predicted error, and what it leaves out; empty if nothing was measured."""
        if self.error is None:
            return ""
        counts = {self.low: self.low_unmeasured, "float8": self.float8_unmeasured}
        without = (f", without {n} nodes in {name} that were not measured" for name, n in counts.items() if n)
        return f"{self.error:.1e}{''.join(without)}"

    def __getitem__(self, name: str) -> PlannedNode:
        """The entry of the node called ``name``.

        Raises:
            KeyError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise UnknownNameError(f"the plan has no node {name!r}")

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
        data: dict[str, Any] = {"version": _VERSION, **plain_data(self, _WRITTEN)}
        for node in data["nodes"]:
            del node["effect"], node["decision"]["rule"]
        for record in (data, *data["nodes"]):
            for key in ("error", "float8", "quantized", "saved"):  # which few plans have
                if record.get(key, False) in (None, []):
                    del record[key]
        return json.dumps(data, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote. The version may be missing.

        Raises:
            ValueError: the text is no such JSON, or was written by a later autocastfx.
        """
        try:
            data: dict[str, Any] = parsed_json(text)
            check_version(data.pop("version", _VERSION))
            return typed_data(cls, data, _READ)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"this is not a plan written by to_json: {error!r}") from None


# The cause of a node's placement as a value: a kind, and the nodes that it names.


class Why(str, Enum):
    """The kind of a cause. Its value is the text, with ``{}`` for each node."""

    ALLOW = "allow"
    DENY = "deny"
    KEEP = "keep"
    PROMOTE = "promote"
    AFTER = "after {}"  # a node that runs in float32
    SHARES_STORAGE = "shares storage that stays float32"
    NO_ALLOW_BEFORE = "no allow op before it"
    INPUT_IS_FLOAT32 = "an input is float32"
    FEWEST_BYTES = "fewest bytes moved"
    FOLDED = "folded"
    MEASURED = "measured: fewest bytes for its error"
    VIEW_OF_WEIGHT = "a view of a 16-bit weight"
    EDITED = "the plan"
    AS_CAPTURED = "as the model has it"  # of a model that is 16-bit already
    # TensorFlow's rule, ``placement: simple``.
    BETWEEN = "between {} and {}"
    NEXT_TO = "next to {}"
    NOT_ENCLOSED = "no two allow ops enclose it"
    ALL_LOW = "all its inputs are low"
    # Nothing that could be cast.
    NO_FLOAT32 = "no float32 value"
    CROSSES_BORDER = "values cross the border of a sub-graph as captured"
    # torch.autocast's dispatch, ``placement: follow``.
    INPUTS_CROSS_BORDER = "its inputs cross a border as captured"
    NO_TENSOR = "gives no tensor"
    NOTHING_TO_CAST = "no input that is cast"
    AS_INPUTS = "as its inputs come"
    FIRST_NOT_CAST = "its first input is not cast"
    NAMES_DTYPE = "the call names its dtype"


# The clause of a sentence, where the value is none.
_CLAUSES = {
    **{why: f"its category is {why.value}" for why in (Why.ALLOW, Why.DENY, Why.KEEP, Why.PROMOTE)},
    Why.AFTER: "it comes after {}, which does",
    Why.SHARES_STORAGE: "it shares memory that stays float32",
    Why.NO_ALLOW_BEFORE: "there is no allow op before it",
    Why.FEWEST_BYTES: "this moves the fewest bytes",
    Why.FOLDED: "it is folded: its kernel computes in float32 inside",
    Why.MEASURED: "this moves the fewest bytes for the error that was measured",
    Why.VIEW_OF_WEIGHT: "it is a view of a 16-bit weight",
    Why.EDITED: "the plan given to convert says so",
    Why.BETWEEN: "it lies between {} and {}",
    Why.NEXT_TO: "it lies next to {}",
}


@dataclass(frozen=True)
class Cause:
    """A kind of cause, with the name of a node for each ``{}`` in its text."""

    why: Why
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.why.value.format(*self.nodes)

    @property
    def clause(self) -> str:
        """The cause as a clause of a sentence that says how the node runs."""
        return _CLAUSES.get(self.why, self.why.value).format(*self.nodes)

    def inside(self, prefix: str) -> Cause:
        """The same cause in a sub-graph, whose nodes have ``prefix`` before their names in a plan."""
        return Cause(self.why, tuple(prefix + node for node in self.nodes))

    @classmethod
    def from_text(cls, text: str) -> Cause:
        """The cause whose text is ``text``.

        Raises:
            ValueError: no cause has this text.
        """
        for why in Why:
            match = re.fullmatch(r"(\S+)".join(map(re.escape, why.value.split("{}"))), text)
            if match is not None:
                return cls(why, match.groups())
        raise ArgumentError(f"{text!r} is no cause of a placement")


# The float8 products of a node, and why the others stay in 16 bits.


class NoFloat8(str, Enum):
    """Why a product stays in 16 bits. Its value is the text, with ``{}`` for each word."""

    NO_RULE = "no float8 rule covers it"
    BY_RULE = "{} leaves it out"  # the place of the rule, with its reason
    BY_RECIPE = "{} keeps it in 16 bits"
    NOT_LOW = "the node runs in float32"
    READS_FLOAT32 = "{} is not in 16 bits"
    NO_WEIGHT = "{} is no parameter"
    OTHER_SHAPE = "{} has {} dimensions, not {}"
    OTHER_FORM = "{} is another number than 1"
    ODD_SIZE = "{} is {}, no multiple of {}"
    TOO_SMALL = "{} is {}, less than {}"
    UNKNOWN_SIZE = "{} is not known before the call"
    LAST = "no other product is computed from it"

    def because(self, *words: object) -> WhyNoFloat8:
        """The reason of this kind with its words."""
        return WhyNoFloat8(self, tuple(map(str, words)))


@dataclass(frozen=True)
class WhyNoFloat8:
    """A kind of reason, with a word for each ``{}`` in its text."""

    why: NoFloat8
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.why.value.format(*self.words)


@dataclass(frozen=True)
class In16Bits:
    """A product that stays in 16 bits, and why."""

    product: Product
    why: WhyNoFloat8


@dataclass(frozen=True)
class ProductError:
    """The relative error of the gradient or the output that a product is predicted to make in float8."""

    product: Product
    error: float


@dataclass(frozen=True)
class PlannedFloat8:
    """The products of a node that run in float8 by a recipe, and those that stay in 16 bits. Printed as one clause.

    ``errors`` are of all products that were measured by this recipe, also of those that stay in 16 bits.
    """

    recipe: str
    products: tuple[Product, ...] = ()
    in_16_bits: tuple[In16Bits, ...] = ()
    emulate: bool = False
    errors: tuple[ProductError, ...] = ()

    def __str__(self) -> str:
        said = {
            str(one.why): ", ".join(o.product for o in self.in_16_bits if o.why == one.why) for one in self.in_16_bits
        }
        left = "; ".join(f"{products} in 16 bits: {why}" if self.products else why for why, products in said.items())
        if not self.products:
            return f"no float8: {left}"
        emulated = ", emulated" if self.emulate else ""
        return f"{self.recipe}{emulated}" + (f" {', '.join(self.products)}; {left}" if left else "")

    @property
    def errors_in_words(self) -> str:
        """Each product's part of the predicted error; empty if none was measured."""
        left_out = {p: "" if p in self.products else " (not in float8)" for p in Product}
        said = (f"{one.product} {one.error:.1e}{left_out[one.product]}" for one in self.errors)
        return f"predicted errors in float8: {', '.join(said)}" if self.errors else ""


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

    @property
    def size(self) -> int:
        """The bytes of a floating-point number in it."""
        return {Precision.LOW: 2}.get(self, 4)


class Forced(str):
    """A reason that decides a node whatever op lists say: its name in plans, and what a person can do about it."""

    remedy: str
    by_numbers: bool  # that 16 bits would round, or cannot hold

    def __new__(cls, name: str, remedy: str = "", *, by_numbers: bool = False) -> Forced:
        """The reason of this name; in a plan that was read from a text it has no more than that."""
        reason = super().__new__(cls, name)
        reason.remedy, reason.by_numbers = remedy, by_numbers
        return reason


forced_by_numbers = partial(Forced, by_numbers=True)
# Those that reports and several passes ask for; the others stand beside their checks, in ``passes/decide/``.
WIDE = forced_by_numbers(
    "forced:wide", "the values it reads are too large for the dtype: scale them in the model, or use bfloat16"
)
EPSILON = forced_by_numbers(
    "forced:epsilon", "the number stands in the model's code: use a larger one there, or bfloat16"
)
CANCELLATION = forced_by_numbers(
    "forced:cancellation",
    "compute the difference without its large terms in the model (torch.cdist, torch.var), or set run to low in an "
    "edited plan",
)
USER_CAST = Forced("forced:user-cast", "the model casts here itself: remove the cast in the model")
NOT_FLOAT32 = Forced("eligibility", "only float32 values are ever cast: there is none here, or it is made here")
SUB_GRAPH = Forced("sub-graph", "values cross the border of a sub-graph as captured: nothing changes it")
UNLISTED = KeyPath("unlisted")  # the source of a decision on an op that no list names
NO_SOURCE = KeyPath("list")  # of one by a rule that was made in Python, with no place of its own


@dataclass(frozen=True)
class Decision:
    """The category that a list or a forced rule gives a node, with the reason.

    ``source`` is the place of the list's rule, printed as ``file:line:column``, or the forced rule. ``rule`` is the
    list's, or the place of a line in the plan given to ``convert``, over which no list wins; None where a category was
    forced, and in a plan read from a text.
    """

    category: Category
    reason: str
    source: TextPlace | Forced
    rule: Rule[Runs] | TextPlace | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.category}, {self.reason or 'no reason given'} ({self.source})"


@dataclass(frozen=True)
class Placement:
    """The precision that a node runs in (its inputs) and the one that its output is stored in, and why.

    Printed without the cause. ``as_stored`` names the arguments that it takes in whatever precision they are stored.
    """

    run: Precision
    store: Precision
    because: Cause
    as_stored: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.run) if self.run is self.store else f"{self.run}, stored {self.store}"

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
    ``effect`` is what it is the size of, to be added up with others'; not in a plan's text. ``float8`` tells of a
    matrix product if the op list has float8 rules.
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
    float8: PlannedFloat8 | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        """Its products that run in float8."""
        return self.float8.products if self.float8 is not None else ()


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
class PlannedQuantized:
    """A value in float8: of which value, in which layout, and who reads it."""

    name: str
    value: str
    layout: Layout
    readers: tuple[str, ...]


@dataclass(frozen=True)
class SavedSize:
    """The bytes that a value takes in a form."""

    keep: Keep
    bytes: int


@dataclass(frozen=True)
class PlannedSaved:
    """A value that backward reads, or that others are recomputed from, and how it is kept.

    Attributes:
        name: of the node that gives it; with ``inside``, of the one whose kernel makes and keeps it.
        op, module: of the node.
        keep: its form.
        bytes: that autograd keeps of it by itself; none if no op saves it.
        kept: that are kept of it in this form.
        readers: the nodes whose backward reads it.
        because: the place of the rule, with its reason.
        recomputes: the nodes that run again in backward to give it, in order.
        inside: ``"drawn"`` if the kernel makes it of random numbers (dropout's mask), ``"computed"`` if of its inputs
            (a loss's probabilities); empty for what a node gives.
        smaller: the forms that would take fewer bytes; none for what has to stay as it is.
    """

    name: str
    op: str
    module: str
    keep: Keep
    bytes: int
    kept: int
    readers: tuple[str, ...] = ()
    because: str = ""
    recomputes: tuple[str, ...] = ()
    inside: str = ""
    smaller: tuple[SavedSize, ...] = ()

    def __str__(self) -> str:
        what = "what its kernel keeps is " if self.inside else ""
        how = f"recomputed by {', '.join(self.recomputes)}" if self.recomputes else f"kept {self.keep.in_words}"
        return f"{what}{how}, {self.kept:,} instead of {self.bytes:,} bytes: {self.because}"


ALIGNED_PRODUCT = "aligned_product"  # a product whose sizes no fast kernel of the device takes, padded


@dataclass(frozen=True)
class Recomposed:
    """A node that stands for captured ones, or does what they did: by which pattern, and their names."""

    pattern: str
    node: str
    replaced: tuple[str, ...]


def check_version(version: object) -> None:
    """Accept the version of a plan's text.

    Raises:
        ValueError: this autocastfx cannot read it.
    """
    if version != _VERSION:
        raise ArgumentError(
            f"this plan has version {version!r}, and this autocastfx reads version {_VERSION}: convert the model again "
            "to write one, or use the autocastfx that wrote it"
        )


def _source(text: str) -> TextPlace | Forced:
    """The source whose text is ``text``."""
    if re.fullmatch(rf"forced:[\w-]+|{NOT_FLOAT32}|{SUB_GRAPH}", text):
        return Forced(text)
    place = re.fullmatch(r"(.+):(\d+):(\d+)", text)
    return Source(place[1], int(place[2]), int(place[3])) if place is not None else KeyPath(*text.split(":", 1))


# The parts of a plan that are one text each.
_WRITTEN = dict.fromkeys((Cause, Source, KeyPath), str)
_READ: Conversions = {Cause: Cause.from_text, TextPlace | Forced: _source}


# Select nodes of a plan by name: a node, an op, a module, or an op inside a module.


def select(plan: Plan, what: str, others: Iterable[str] = ()) -> tuple[PlannedNode, ...]:
    """Return the nodes that ``what`` names, in the order of the plan.

    Args:
        plan: the plan of one graph.
        what: a node (``softmax_3``), an op (``softmax``), the path of a module (``layers.0.attn``), or an op
            inside a module (``layers.0.attn.softmax``). Paths may be patterns (``layers.*.attn``).
        others: what else the caller knows, to be suggested.

    Raises:
        KeyError: nothing has this name; the message suggests the nearest.
    """
    named = [node for node in plan.nodes if what in (node.name, node.op)]
    module, _, op = what.rpartition(".")
    named = named or [node for node in plan.nodes if node.op == op and _is_inside(node.module, module)]
    named = named or [node for node in plan.nodes if _is_inside(node.module, what)]
    if not named:
        names = {name for node in plan.nodes for name in (node.name, node.op, node.module, f"{node.module}.{node.op}")}
        hint = nearest(what, {*names, *others})
        raise UnknownNameError(f"no node, op or module of the plan is called {what!r}{hint}")
    return tuple(named)


def _is_inside(module: str, pattern: str) -> bool:
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


# The predicted error that several nodes of a plan make together.


def joint_error(nodes: Iterable[PlannedNode]) -> float | None:
    """Return the relative error that ``nodes`` make together, as ``Plan.error`` is that of all.

    Their effects are added up, so that they may cancel: it can be less than the error of one of them.

    Returns:
        None if no node has an effect: nothing was measured, or the plan was read from a text.
    """
    effects = [node.effect for node in nodes if node.effect]
    return rms(added(effects)) if effects else None


# The prices by which a placement is chosen, beside the bytes that it moves: of errors, and of products' time.


@dataclass(frozen=True)
class Prices:
    """A measurement, and what its errors cost.

    Attributes:
        sensitivity: the effect of each node.
        per_error: the bytes that a squared relative error of 1 costs; None: the errors are told in plans, and change
            no placement.
        bytes_per_flop: the bytes that a device moves in the time by which a float32 product takes longer, for each of
            its operations.
    """

    sensitivity: Sensitivity
    per_error: float | None = None
    bytes_per_flop: float = 0.0


# Why a node runs as it does, in a sentence.


def because_of(entry: PlannedNode | None) -> str:
    """The reason for a node's precision; ``entry`` is None for a node that the conversion made."""
    if entry is None:
        return "the conversion made this node"
    because = entry.placement.because
    if because.why in (Why.ALLOW, Why.DENY, Why.KEEP, Why.PROMOTE):
        return f"its category is {entry.decision}"
    return f"{because.clause}; its category is {entry.decision}"
