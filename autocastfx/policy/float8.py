"""Which products of an op run in float8, by which recipe, and from which sizes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from autocastfx.errors import ArgumentError, TextPlace

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


class Product(str, Enum):
    """One of the three matrix products of ``output = input @ weight.T``, with its word in op lists."""

    OUTPUT = "output"  # input @ weight.T, in forward
    INPUT_GRADIENT = "input_gradient"  # gradient @ weight, in backward
    WEIGHT_GRADIENT = "weight_gradient"  # gradient.T @ input, in backward

    def __str__(self) -> str:
        return self.value


class Layout(str, Enum):
    """How a matrix is quantised: what shares a scale, and how the numbers lie.

    Attributes:
        is_turned: the matrix is stored transposed, so that what shares a scale is read by rows.
        scales: the dtype of the scales.
        block: how many consecutive numbers of a row share a scale, when it is read; 0: all.
    """

    is_turned: bool
    scales: torch.dtype
    block: int

    TENSOR = "tensor"  # one scale
    ROWS = "rows"  # a scale for each row
    COLUMNS = "columns", True  # a scale for each column
    BLOCKS = "blocks", False, E8M0, 32  # a scale for each block of a row
    COLUMN_BLOCKS = "column_blocks", True, E8M0, 32  # a scale for each block of a column

    def __new__(cls, word: str, is_turned: bool = False, scales: torch.dtype = torch.float32, block: int = 0) -> Layout:
        """A member with its word in plans and in the arguments of operators."""
        made = str.__new__(cls, word)
        made._value_, made.is_turned, made.scales, made.block = word, is_turned, scales, block
        return made

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Recipe:
    """How the operands of each product are quantised and multiplied: all that is decided by a recipe's name.

    Numbers are rounded to the nearest, and those beyond the largest to it. What a number format can hold says
    ``torch.finfo``.

    Attributes:
        name: its word in op lists.
        meaning: its line on the reference page.
        layouts: of the left and the right operand, in the order of :class:`Product`'s comments. A product that is
            missing stays in 16 bits.
        gradient: the float8 dtype of gradients.
        power_of_two: scales are rounded down to a power of two.
        numbers: the float8 dtype of other operands.
        multiple: what N and K are multiples of.
        capability: of the first NVIDIA GPUs whose products of such numbers are called, at a GPU's float8 rate. None: no
            such product is called, and the numbers are multiplied in float32.
    """

    name: str
    meaning: str
    layouts: Mapping[Product, tuple[Layout, Layout]] = field(hash=False)
    gradient: torch.dtype
    power_of_two: bool
    numbers: torch.dtype = E4M3
    multiple: int = 16  # torch's scaled products take no other sizes
    capability: tuple[int, int] | None = (8, 9)

    def quantizing(self, layout: Layout, *, is_gradient: bool = False) -> tuple[str, torch.dtype, bool]:
        """The arguments of the operator ``quantize`` for an operand."""
        return layout.value, self.gradient if is_gradient else self.numbers, self.power_of_two


_BY_ROWS = {
    Product.OUTPUT: (Layout.ROWS, Layout.ROWS),
    Product.INPUT_GRADIENT: (Layout.ROWS, Layout.COLUMNS),
    Product.WEIGHT_GRADIENT: (Layout.COLUMNS, Layout.COLUMNS),
}
# The first three are torchao's: ``Float8LinearConfig.from_recipe_name`` of torchao 0.18, ``torchao/float8/config.py``.
# MXFP8 is that of the OCP Microscaling Formats Specification v1.0.
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
        Recipe(
            "mxfp8",
            "MXFP8: a scale in e8m0, a power of two, for each 32 consecutive numbers of a sum; all e4m3. N and K are "
            "multiples of 32. Its products are float32 ones of float8 numbers: only a CPU has them without `emulate`",
            {
                Product.OUTPUT: (Layout.BLOCKS, Layout.BLOCKS),
                Product.INPUT_GRADIENT: (Layout.BLOCKS, Layout.COLUMN_BLOCKS),
                Product.WEIGHT_GRADIENT: (Layout.COLUMN_BLOCKS, Layout.COLUMN_BLOCKS),
            },
            E4M3,
            power_of_two=True,
            multiple=32,
            capability=None,
        ),
    )
}
# The arguments of ``float8_linear`` that are quantised before it: of which product they are the left or right operand.
PREPARED: Mapping[str, tuple[Product, int]] = {
    "input_forward": (Product.OUTPUT, 0),
    "weight_forward": (Product.OUTPUT, 1),
    "input_backward": (Product.WEIGHT_GRADIENT, 1),
    "weight_backward": (Product.INPUT_GRADIENT, 1),
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
class Float8Settings:
    """What a rule says of float8 products. A setting that is None is left to other rules.

    Attributes:
        recipe: the name of one of :data:`RECIPES`.
        products: those that run in float8; none if empty.
        least: the smallest M, N and K (``[M, K] @ [K, N]``, the product of the output).
        last: whether a product may run in float8 from whose result no other product is computed.
        emulate: compute with float32 products of the float8 numbers, on a device without float8 products.
    """

    recipe: str | None = None
    products: tuple[Product, ...] | None = None
    least: tuple[tuple[str, int], ...] | None = None
    last: bool | None = None
    emulate: bool | None = None

    @property
    def given(self) -> Mapping[str, Any]:
        """The settings that are not left to other rules, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, earlier: Float8Settings) -> Float8Settings:
        """These settings, and those of ``earlier`` that they leave open."""
        return replace(earlier, **self.given)

    def __str__(self) -> str:
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


@dataclass(frozen=True)
class Float8Choice:
    """The settings of one op's products, each by the rule that fits best.

    ``source`` and ``reason`` are those of the rule that chose the products. Other attributes are as in
    :class:`Float8Settings`.
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
