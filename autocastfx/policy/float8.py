"""Float8 rules of an op list: which products of an op run in float8, by which recipe, and from which sizes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import Enum

import torch

from autocastfx.errors import ArgumentError, OpListError, TextPlace
from autocastfx.policy.rule import ModuleRule

MULTIPLE = 16  # of N and K: torch's scaled products take no other sizes
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Product(str, Enum):
    """One of the three matrix products of ``output = input @ weight.T``, with its word in op lists."""

    OUTPUT = "output"  # input @ weight.T, in forward
    INPUT_GRADIENT = "input_gradient"  # gradient @ weight, in backward
    WEIGHT_GRADIENT = "weight_gradient"  # gradient.T @ input, in backward

    def __str__(self) -> str:
        return self.value


class Layout(str, Enum):
    """How a matrix is quantised: what shares a scale, and how the numbers lie."""

    TENSOR = "tensor"  # one scale
    ROWS = "rows"  # a scale for each row
    COLUMNS = "columns"  # a scale for each column; stored transposed, so that it is read by rows

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Recipe:
    """How the operands of each product are quantised, as torchao's recipe of this name does.

    Source: ``Float8LinearConfig.from_recipe_name`` of torchao 0.18, ``torchao/float8/config.py``.

    Attributes:
        name: its word in op lists.
        meaning: its line on the reference page.
        layouts: of the left and the right operand, in the order of :class:`Product`'s comments. A product that is
            missing stays in 16 bits.
        gradient: the float8 dtype of gradients; other operands are e4m3.
        power_of_two: scales are rounded down to a power of two.
    """

    name: str
    meaning: str
    layouts: Mapping[Product, tuple[Layout, Layout]] = field(hash=False)
    gradient: torch.dtype
    power_of_two: bool


_BY_ROWS = {
    Product.OUTPUT: (Layout.ROWS, Layout.ROWS),
    Product.INPUT_GRADIENT: (Layout.ROWS, Layout.COLUMNS),
    Product.WEIGHT_GRADIENT: (Layout.COLUMNS, Layout.COLUMNS),
}
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "tensorwise",
            "one scale for each operand; gradients are e5m2, other operands e4m3",
            dict.fromkeys(Product, (Layout.TENSOR, Layout.TENSOR)),
            E5M2,
            power_of_two=False,
        ),
        Recipe(
            "rowwise",
            "a scale for each row of the left and each column of the right operand, a power of two; all e4m3",
            _BY_ROWS,
            E4M3,
            power_of_two=True,
        ),
        Recipe(
            "rowwise_gw_hp",
            "as `rowwise`, but the weight's gradient stays in 16 bits, and that of the input reads the weight with one "
            "scale",
            {
                Product.OUTPUT: (Layout.ROWS, Layout.ROWS),
                Product.INPUT_GRADIENT: (Layout.ROWS, Layout.TENSOR),
            },
            E4M3,
            power_of_two=True,
        ),
    )
}
SIZES = ("M", "N", "K")


def recipe_of(float8: str | bool | None) -> str:
    """Return the name of the recipe that an argument ``float8`` asks for; True: ``rowwise``; empty: none.

    Raises:
        ValueError: no recipe has this name, or it is something else.
    """
    if not (float8 is None or isinstance(float8, bool) or (isinstance(float8, str) and float8 in RECIPES)):
        raise ArgumentError(f"float8 is True or one of {', '.join(map(repr, RECIPES))}, not {float8!r}")
    return float8 if isinstance(float8, str) else Float8Choice.recipe if float8 else ""


@dataclass(frozen=True)
class Operands:
    """The arguments of an op that ``input @ weight.T`` can stand for: input, weight and bias (empty: it has none).

    With ``transposes`` the weight is ``[K, N]``, and else ``[N, K]``.
    """

    input: str
    weight: str
    bias: str = ""
    transposes: bool = True


OPERANDS: Mapping[str, Operands] = {
    "linear": Operands("input", "weight", "bias", transposes=False),
    "addmm": Operands("mat1", "mat2", "self"),
    "mm": Operands("self", "mat2"),
    "matmul": Operands("self", "other"),
}


@dataclass(frozen=True)
class Float8Rule:
    """A line of a list on the float8 products of an op, or of the ops in some modules.

    A setting that is None is left to a rule that fits less well, then to the defaults of :class:`Float8Choice`.

    Attributes:
        op: its name; empty: every op that has float8 products. Only a rule for modules leaves it empty.
        path: as in :class:`ModuleRule`; empty for a rule for an op everywhere.
        device: only on devices of this type; on all if empty.
        recipe: the name of one of :data:`RECIPES`.
        products: those that run in float8; none if empty.
        least: the smallest M, N and K (``[M, K] @ [K, N]``, the product of the output).
        last: whether a product may run in float8 from whose result no other product is computed.
        emulate: compute with float32 products of the float8 numbers, on a device without float8 products.
        reason: text that plans and dumps show.
        rank: of two rules that fit equally well, the higher rank wins. A later list ranks above an earlier one.
        source: the place of the rule.
        shipped: it comes with this package.
    """

    op: str = ""
    path: str = ""
    device: str = ""
    recipe: str | None = None
    products: tuple[Product, ...] | None = None
    least: tuple[tuple[str, int], ...] | None = None
    last: bool | None = None
    emulate: bool | None = None
    reason: str = ""
    rank: int = 0
    source: TextPlace | None = field(default=None, compare=False)
    shipped: bool = field(default=False, compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """Op, path and device. A later rule with the same key is laid over this one."""
        return (self.op, self.path, self.device)

    @property
    def subject(self) -> str:
        """Op, modules and device that the rule covers, in words."""
        what = self.op or "products"
        return f"float8 of {what}{f' in {self.path}' if self.path else ''}{f' on {self.device}' if self.device else ''}"

    @property
    def wanted(self) -> str:
        """Its settings, in words."""
        if self.products == ():
            return "none"
        least = ", ".join(f"{name} {size}" for name, size in self.least or ())
        words = (
            self.recipe,
            ", ".join(self.products) if self.products is not None else None,
            f"from {least}" if least else None,
            None if self.last is None else "the last product too" if self.last else "not the last product",
            None if self.emulate is None else "emulated" if self.emulate else "not emulated",
        )
        return "; ".join(word for word in words if word is not None) or "as other rules say"

    def covers(self, names: Set[str], paths: Sequence[str], device: str) -> bool:
        """True if the rule speaks of an op with these names, in modules with these paths, on this device type."""
        if self.device not in ("", device) or (self.op and self.op not in names):
            return False
        return not self.path or self._depth(paths) >= 0

    def fit(self, paths: Sequence[str]) -> tuple[int, bool, bool, int]:
        """How well it fits an op that it covers: the more, the better."""
        return (self._depth(paths) if self.path else -1, bool(self.op), bool(self.device), self.rank)

    def _depth(self, paths: Sequence[str]) -> int:
        modules = ModuleRule(self.path, "keep")
        return max((depth for depth, path in enumerate(paths) if modules.covers(path)), default=-1)

    def over(self, earlier: Float8Rule) -> Float8Rule:
        """This rule, and what ``earlier`` says where it says nothing; at the place of the one that chooses products."""
        both = replace(self, **{name: value for name, value in _given(earlier) if getattr(self, name) is None})
        if self.products is not None or earlier.products is None:
            return both
        return replace(both, source=earlier.source, reason=self.reason or earlier.reason)


_SETTINGS = tuple(f.name for f in fields(Float8Rule) if f.default is None and f.name != "source")


def _given(rule: Float8Rule) -> Iterator[tuple[str, object]]:
    """Yield the settings of a rule, with their names."""
    for name in _SETTINGS:
        if (value := getattr(rule, name)) is not None:
            yield name, value


@dataclass(frozen=True)
class Float8Choice:
    """The settings of one op's products, each by the rule that fits best.

    ``source`` and ``reason`` are those of the rule that chose the products. Other attributes are as in
    :class:`Float8Rule`.
    """

    recipe: str = "rowwise"
    products: tuple[Product, ...] = tuple(Product)
    least: tuple[tuple[str, int], ...] = ()
    last: bool = True
    emulate: bool = False
    source: TextPlace | None = None
    reason: str = ""

    @property
    def in_float8(self) -> tuple[Product, ...]:
        """The products that the rules choose and the recipe has."""
        return tuple(product for product in self.products if product in RECIPES[self.recipe].layouts)


def chosen(rules: Iterable[Float8Rule], names: Set[str], paths: Sequence[str], device: str) -> Float8Choice | None:
    """Return what ``rules`` say of an op: each setting by the rule that fits best of those that give it.

    Args:
        rules: of one list.
        names: that the op may be listed under.
        paths: of the modules around it, outermost first.
        device: the type that it runs on.

    Returns:
        None if no rule covers the op.

    Raises:
        OpListError: two rules fit equally well and contradict each other.
    """
    covering = sorted((r for r in rules if r.covers(names, paths, device)), key=lambda r: r.fit(paths))
    if not covering:
        return None
    settings: dict[str, object] = {}
    by: dict[str, Float8Rule] = {}
    for rule in covering:
        for name, value in _given(rule):
            other = by.get(name)
            if other is not None and other.fit(paths) == rule.fit(paths) and getattr(other, name) != value:
                raise OpListError(
                    f"{rule.subject!r} is {rule.wanted} here, and {other.subject!r} is {other.wanted} at "
                    f"{other.source}: both fit equally well. Give one of the two a narrower path, or a higher 'rank'.",
                    rule.source,
                )
            settings[name], by[name] = value, rule
    speaks = by.get("products", covering[-1])
    return replace(Float8Choice(source=speaks.source, reason=speaks.reason), **settings)
