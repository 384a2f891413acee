"""The rules of an op list: categories of ops, rules for modules, depth limits and demands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from autocastfx.errors import ArgumentError, TextPlace
from autocastfx.graph.names import arguments
from autocastfx.graph.node import enclosing_modules
from autocastfx.policy.float8 import Float8Settings
from autocastfx.policy.saved import Keep


@dataclass(frozen=True)
class Selector:
    """What a rule is for: calls of some ops, inside of some modules, with some arguments, on a type of device.

    Attributes:
        ops: their names; any if empty.
        path: a glob of module paths (``encoder.*.attn``; ``**`` stands for any number of names), or ``re:`` and a
            regular expression. It has to match the whole path of a module, and covers everything that runs inside it.
            Everywhere if empty.
        when: conditions on the arguments, all of which have to hold.
        device: only on devices of this type; on all if empty.
    """

    ops: tuple[str, ...] = ()
    path: str = ""
    when: tuple[Condition, ...] = ()
    device: str = ""

    def covers(self, path: str) -> bool:
        """True if the pattern matches this module path; the root's is empty."""
        if self.path.startswith("re:"):
            return module_pattern(self.path).fullmatch(path) is not None
        return module_pattern(self.path).fullmatch(f"{path}." if path else "") is not None

    @cached_property
    def _ops(self) -> frozenset[str]:
        return frozenset(self.ops)

    def fit(self, call: Call) -> Fit | None:
        """How specific it is, of a call that it selects: the more, the better; None for any other call."""
        places = [place for name, place in call.names.items() if name in self._ops]
        if self.device not in ("", call.device) or (self.ops and not places):
            return None
        depths = [depth for depth, path in enumerate(call.paths) if self.covers(path)] if self.path else [-1]
        if not depths or not all(condition.holds(call.arguments) for condition in self.when):
            return None
        return depths[-1], bool(self.ops), len(self.when), -min(places, default=0), bool(self.device)


@dataclass(frozen=True)
class Runs:
    """What a rule says of the precision: a category; for modules also ``float32`` (as ``deny``), ``tf32``, or ``low``.

    ``low`` is ``allow`` even for denied ops, but numbers that the 16-bit dtype cannot hold still force float32.
    ``tf32`` is ``deny``, but lets products run in TF32 on CUDA.
    """

    word: str

    @property
    def category(self) -> Category:
        """The category that the word stands for."""
        others = {"low": Category.ALLOW, "float32": Category.DENY, "tf32": Category.DENY}
        return others.get(self.word) or Category(self.word)

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class Demand:
    """A demand of an op that cannot use a rounded operand: it and the ops that lead to it run in float32.

    Attributes:
        through: how far back the demand reaches. ``free``: to the ops before it whose precision the placement chooses,
            except those that an ``allow`` op reads in 16 bits. ``products``: to all of these, and the products of two
            computed values that they read. ``both``: as ``products``, and to the products of two computed values that
            read the result. ``nothing``: the demand is lifted.
        arguments: demand float32 for these arguments alone; for all if empty.
        of: demand it only if one of these ops makes one of ``arguments``, or of ``at`` if that is given.
        at: the arguments that ``of`` applies to; ``arguments`` if empty.
    """

    through: str = "free"
    arguments: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    at: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" for {', '.join(self.arguments)}" if self.arguments else ""
        of = f" of {', '.join(self.of)}" if self.of else ""
        return f"through {self.through}{where}{of}" + (f" at {', '.join(self.at)}" if self.at else "")


Effect = TypeVar("Effect", Runs, Float8Settings, Keep, Demand, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Rule(Selector, Generic[Effect]):
    """A line of an op list: what it is for, and what it says of that.

    Attributes:
        effect: a category, settings of float8 products, the form in which values are kept for backward, or a demand.
        reason: text that plans, dumps and errors show.
        rank: of two rules that fit a node equally well, the higher rank wins. A later list ranks above an earlier one.
        source: the place of the rule.
        shipped: it comes with this package.
    """

    effect: Effect
    reason: str = ""
    rank: int = 0
    source: TextPlace | None = field(default=None, compare=False)
    shipped: bool = field(default=False, compare=False)

    @property
    def key(self) -> RuleKey:
        """The kind of effect and what the rule is for. A later rule with the same key is laid over this one."""
        return (type(self.effect), self.ops, self.path, self.when, self.device)

    @property
    def heading(self) -> str:
        """The key of a list under which the rule stands."""
        keys = {Runs: self.wanted, Float8Settings: "float8", Keep: "saved", Demand: "demands"}
        return "modules" if self.path and not isinstance(self.effect, Keep) else keys[type(self.effect)]

    @property
    def wanted(self) -> str:
        """The effect, in words."""
        return str(self.effect)

    @property
    def category(self: Rule[Runs]) -> Category:
        """The category that the rule gives."""
        return self.effect.category

    @property
    def subject(self) -> str:
        """What the rule is for, in words."""
        kind, other = _SUBJECTS.get(type(self.effect), ("modules " if self.path else "", ""))
        parts = (
            ", ".join(self.ops) or other,
            f"{'in ' if self.ops or other else ''}{self.path}" if self.path else "",
            f"where {', '.join(map(str, self.when))}" if self.when else "",
            f"on {self.device}" if self.device else "",
        )
        return kind + " ".join(filter(None, parts))

    def over(self, earlier: Rule[Effect]) -> Rule[Effect]:
        """This rule in place of one of the same key, of which it takes the float8 settings that it leaves open."""
        now, before = self.effect, earlier.effect
        if not isinstance(now, Float8Settings) or not isinstance(before, Float8Settings):
            return self
        both = replace(self, effect=now.over(before))
        if now.products is not None or before.products is None:
            return both
        return replace(both, source=earlier.source, reason=self.reason or earlier.reason)


class Category(str, Enum):
    """The category that a list gives an op."""

    ALLOW = "allow"  # runs in 16 bits
    DENY = "deny"  # float32, as are the infer ops that follow it
    INFER = "infer"  # safe in 16 bits, but follows its neighbours; float32 after a deny
    CLEAR = "clear"  # moves or selects values; follows its neighbours
    PROMOTE = "promote"  # 16 bits only if all its floating inputs already are
    KEEP = "keep"  # exactly as captured
    BAN = "ban"  # refused

    @property
    def is_free(self) -> bool:
        """True if its neighbours decide the precision."""
        return self in (Category.INFER, Category.CLEAR, Category.PROMOTE)

    @property
    def may_be_low(self) -> bool:
        """True if an op of this category may run in 16 bits."""
        return self.is_free or self.is_low

    @property
    def is_low(self) -> bool:
        """True if an op of this category runs in 16 bits, whatever its neighbours do."""
        return self is Category.ALLOW

    @property
    def leads(self) -> bool:
        """True if the infer ops that follow may be 16-bit, for it gives what is worth keeping so."""
        return self is Category.ALLOW

    @property
    def is_float32(self) -> bool:
        """True if an op of this category runs in float32, whatever its neighbours do."""
        return self is Category.DENY

    @property
    def is_fixed(self) -> bool:
        """True if what an op of this category gives stays as it was captured."""
        return self.is_float32 or self is Category.KEEP

    @property
    def taints(self) -> bool:
        """True if the infer ops that follow are float32, too."""
        return self is Category.DENY

    @property
    def strength(self) -> int:
        """The less, the more it counts where ops of several categories are placed as one."""
        return _STRONGEST_FIRST.index(self)

    def __str__(self) -> str:
        return self.value


_STRONGEST_FIRST = (
    *(Category.BAN, Category.KEEP, Category.DENY),
    *(Category.ALLOW, Category.PROMOTE, Category.INFER, Category.CLEAR),
)
Scalar = str | bool | int | float | None


@dataclass(frozen=True)
class Condition:
    """An argument of a call has one of ``values``.

    A list argument has a value if all its members do; a dtype, layout or device is compared by its name.
    """

    argument: str
    values: tuple[Scalar, ...]

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        """True if a call with these arguments, defaults included, meets the condition."""
        return self.argument in arguments and any(_is(arguments[self.argument], v) for v in self.values)

    def __str__(self) -> str:
        return f"{self.argument}={'|'.join(_word(v) for v in self.values)}"


def _is(given: Any, wanted: Scalar) -> bool:
    if isinstance(given, Sequence) and not isinstance(given, str):
        return bool(given) and all(_is(member, wanted) for member in given)
    if isinstance(wanted, bool) or wanted is None or isinstance(given, bool):
        return given is wanted
    if isinstance(wanted, str):
        names = (torch.dtype, torch.layout, torch.memory_format, torch.device)
        return (str(given).removeprefix("torch.") if isinstance(given, names) else given) == wanted
    return isinstance(given, (int, float)) and given == wanted


def _word(value: Scalar) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


Fit = tuple[int, bool, int, int, bool]


@dataclass(frozen=True)
class Call:
    """What selectors see of a node: the names that it may be listed under, each with its place, and its device type.

    The fewer the place, the better the name fits.
    """

    node: fx.Node
    names: Mapping[str, int]
    device: str

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of the modules around it, outermost first."""
        return enclosing_modules(self.node)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Its arguments by name, defaults included."""
        return arguments(self.node)


# The words of a rule's subject before its ops, and in their place, by the type of its effect.
_SUBJECTS: Mapping[type, tuple[str, str]] = {
    Float8Settings: ("float8 of ", "products"),
    Keep: ("saved ", "values"),
    Demand: ("demand of ", ""),
}
RuleKey = tuple[type, tuple[str, ...], str, tuple[Condition, ...], str]


@lru_cache(maxsize=1024)
def module_pattern(path: str) -> re.Pattern[str]:
    """Compile a glob or ``re:`` expression of module paths. A glob's pattern expects paths with a dot at their end.

    Raises:
        ValueError: the glob or the expression is malformed; the message says why.
    """
    if path.startswith("re:"):
        try:
            return re.compile(path[3:])
        except re.error as error:
            where = "" if error.pos is None else f" at character {error.pos + 1} of it"
            raise ArgumentError(f"'{path[3:]}' is no regular expression: {error.msg}{where}") from None
    return re.compile("".join(_segment(name, path) for name in path.split(".")))


def _segment(name: str, path: str) -> str:
    if name == "**":
        return r"(?:[^.]+\.)*"
    if not name:
        raise ArgumentError(f"the glob '{path}' has an empty name between dots. Write '**' for any module")
    if "**" in name:
        raise ArgumentError(f"in the glob '{path}', '**' is not a whole name between dots, as in 'encoder.**.attn'")
    if stray := re.search(r"[\\^$()|+{}\s]", name):
        raise ArgumentError(f"the glob '{path}' holds {stray[0]!r}; a regular expression starts with 're:'")
    if name == "*":
        return r"[^.]+\."
    parts = re.findall(r"\[!?\]?[^\]]*\]|.", name)
    if "[" in parts:
        raise ArgumentError(f"the glob '{path}' has a '[' without a ']'")
    translated = [_CHARACTERS.get(p) or (_character_class(p, path) if len(p) > 1 else re.escape(p)) for p in parts]
    return "".join(translated) + r"\."


_CHARACTERS = {"*": "[^.]*", "?": "[^.]"}


def _character_class(text: str, path: str) -> str:
    inside = text[1:-1].replace("\\", r"\\")
    translated = f"[^.{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    try:
        re.compile(translated)
    except re.error as error:
        raise ArgumentError(f"in the glob '{path}', '{text}' is no set of characters: {error.msg}") from None
    return translated


ANY_REDUCTION = "*"  # stands for every op of the reduction group


@dataclass(frozen=True)
class DepthLimit:
    """A number of elements that a list sets as limit (None: no limit), with its place in the list.

    In ``reduction_depth``: the most that an op may reduce into one in 16 bits. In ``product_depth``: the fewest that a
    contraction must add up to count as a product. In ``backward_depth``: the most gradients that 16 bits may add up.
    """

    most: int | None
    source: TextPlace | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return "no limit" if self.most is None else str(self.most)


@dataclass(frozen=True)
class KeptArgs:
    """The ``names`` of the arguments of an op that stay float32 where it runs in 16 bits, with their place."""

    names: tuple[str, ...]
    source: TextPlace | None = field(default=None, compare=False)
    shipped: bool = field(default=False, compare=False)
