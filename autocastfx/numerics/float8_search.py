"""Search for the products that run in float8: of the least error at a share of operations, or of the least time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from autocastfx.errors import SensitivityError
from autocastfx.graph.node import argument
from autocastfx.numerics.choice import Candidate, Choice
from autocastfx.numerics.plan_search import Found, Group, Limit, PlanSearch, Point, group_of
from autocastfx.plan.plan import NoFloat8, Plan, PlannedFloat8, PlannedNode, Precision
from autocastfx.policy.float8 import OPERANDS, RECIPES, Product
from autocastfx.policy.op_list import OpList
from autocastfx.report.lint.roofline import Gpu


@dataclass(frozen=True)
class FloatProduct:
    """A product of a node that can run in float8.

    Attributes:
        error: the squared relative error in float8.
        gain: the bytes moved in the time by which it is faster than in 16 bits, once its operands are quantised.
        reads: the quantised values that it reads, and the bytes that quantising each of them moves.
    """

    node: PlannedNode
    product: Product
    flops: int
    error: float
    gain: float
    reads: Mapping[Hashable, float]

    @property
    def key(self) -> tuple[Group, Product]:
        """Module, op and product: a rule names no single node."""
        return group_of(self.node), self.product


@dataclass
class Float8Search(PlanSearch):
    """The search for a placement and for products in float8.

    Placement and selection are made once, one after the other, at one price of an error. A product in float8 reads the
    16-bit values that it would read anyhow, for each is quantised from its 16-bit version, and it runs only where
    its node runs in 16 bits: the selection adds and saves no cast, and no term of the placement's cut depends on it.
    Another round would find the same placement.

    For a share, the placement is that of the list to start from, and the plan is the one of the least error. For a
    limit of errors it is the one of the least time, by the roofline.

    Attributes:
        recipe: of products, by name.
        gpu: whose rates say what a product gains.
        products: those that the list lets run in float8, and that were measured.
    """

    decades: ClassVar[range] = range(-4, 7)
    fills: ClassVar[bool] = True

    recipe: str = field(kw_only=True)
    gpu: Gpu = field(kw_only=True)
    products: list[FloatProduct] = field(init=False, default_factory=list[FloatProduct])

    def __post_init__(self) -> None:
        super().__post_init__()
        ops = sorted({node.op for node in self.start.nodes if node.op in OPERANDS})
        rule = OpList.of({"float8": [{"ops": ops, "recipe": self.recipe}]} if ops else {})
        variant, effects = self.complete(rule), self.effects
        self._nodes, made = variant.plan.nodes, {node.name: node for node in variant.graph.nodes}
        self._flops, self._kept_out = 0, Counter[str]()
        for node in self._nodes:
            effect, float8 = effects.get((node.name, node.op, node.module)), node.float8
            if effect is None or float8 is None or not effect.products:
                continue
            self._flops += effect.flops * len(effect.products)
            for product in effect.products:
                if why := self._why_not(node, float8, Product(product)):
                    self._kept_out[why] += effect.flops
            self.products += (
                product_of(node, one.product, one.error, effect.sizes, made.get(node.name), self.gpu)
                for one in float8.errors
                if one.product in float8.products
            )

    def _why_not(self, node: PlannedNode, float8: PlannedFloat8, product: Product) -> str:
        """Why a product that was measured cannot be chosen; empty if it can."""
        why = next((one.why for one in float8.in_16_bits if one.product is product), None)
        if why is not None:
            return f"{why} ({node.decision.source})" if why.why is NoFloat8.NOT_LOW else str(why)
        is_other = product not in {one.product for one in float8.errors}
        return f"its recipe is {float8.recipe}, and {self.recipe} was measured" if is_other else ""

    def started(self, measured: float) -> Point:
        """Return the point of the list to start from, with what it runs in float8 itself."""
        plan = self.complete(OpList()).plan
        own = {(group_of(n), p) for n in plan.nodes if n.float8 is not None for p in n.float8.products}
        return replace(super().started(measured), predicted=plan.error or 0.0, **self._gains(own))

    def _choice(self, plan: Plan, *, by_flops: bool = False) -> Choice:
        """The products of nodes that run in 16 bits, by what a rule can say."""
        groups: dict[object, list[FloatProduct]] = {}
        low = {node.name for node in plan.nodes if node.placement.run is Precision.LOW}
        for one in self.products:
            if one.node.name in low:
                groups.setdefault(one.key, []).append(one)
        costs = {} if by_flops else {value: cost for one in self.products for value, cost in one.reads.items()}
        candidates = [
            Candidate(
                sum(one.flops if by_flops else one.gain for one in own),
                sum(one.error for one in own),
                tuple(dict.fromkeys(value for one in own for value in one.reads)),
                key,
            )
            for key, own in groups.items()
        ]
        return Choice(candidates, costs)

    def _gains(self, chosen: Collection[object]) -> dict[str, float]:
        """The share and the time that chosen products save, as a point has them."""
        choice = self._choice(self.start)
        flops = sum(one.flops for one in self.products if one.key in chosen)
        worth = choice.worth([i for i, one in enumerate(choice.candidates) if one.key in chosen])
        return {"share": flops / self._flops if self._flops else 0.0, "saved": worth / self.gpu.bandwidth}

    def _in_float8(self, plan: Plan, choice: Choice, chosen: Collection[int]) -> Found:
        """A placement with the products that were chosen for it."""
        error = math.hypot(plan.error or 0.0, math.sqrt(choice.error(chosen)))
        return Found(Point("cut", plan.traffic.moved, error, **self._gains(choice.keys(chosen))), plan)

    def _found_at(self, price: float) -> Found:
        plan = self._cut(OpList(), price)
        choice = self._choice(plan)
        return self._in_float8(plan, choice, choice.at(price))

    def _candidates(self, limit: Limit, ratio: float) -> list[Found]:
        if limit.share is None:
            return super()._candidates(limit, ratio)
        choice = self._choice(self.start, by_flops=True)
        chosen = self._at_share(limit.share, choice)
        every = range(len(choice.candidates))
        unit = choice.worth(every) / choice.error(every) if choice.error(every) else 0.0
        for half in self.decades:
            price = unit * 10.0 ** (half / 2)
            self.cuts[price] = self._in_float8(self.start, choice, choice.at(price))
        return [self._with_rules(Found.of("", self.start, OpList()), choice, chosen, None)]

    def _filled(self, cuts: Sequence[Found], limit: Limit, ratio: float) -> Iterator[Found]:
        yield from ()  # products take what a placement leaves of a limit

    def _at_share(self, share: float, choice: Choice) -> Collection[int]:
        if not self._flops:
            raise SensitivityError(
                "the model has no product that can run in float8: one of a weight, whose N and K are multiples of "
                f"{RECIPES[self.recipe].multiple}. Leave float8 and share out."
            )
        chosen = choice.least_error(share * self._flops * (1 - 1e-9))
        if chosen is None:
            most = choice.worth(range(len(choice.candidates))) / self._flops
            kept_out = self._kept_out.most_common(_MOST_REASONS)
            said = "; ".join(f"{flops / self._flops:.0%}: {why}" for why, flops in kept_out)
            others = len(self._kept_out) - len(kept_out)
            more = f"; and {others} other reasons" if others else ""
            raise SensitivityError(
                f"{share:.0%} of products in float8 are more than can be: {most:.0%}, by operations. The list "
                f"{self.converter.op_list.name} keeps out {said}{more}. Give a smaller share or another op_list."
            )
        return chosen

    def _said(self, found: Found, error: float) -> Found:
        if found.rules is not None:
            return found
        placed = self._placed(found.plan)
        choice = self._choice(placed.plan)
        chosen = choice.most_worth(max(0.0, error**2 - placed.point.predicted**2))
        return self._with_rules(placed, choice, chosen, self.gpu)

    def _with_rules(self, placed: Found, choice: Choice, chosen: Collection[int], gpu: Gpu | None) -> Found:
        """Say chosen products as rules, laid over those of a placement."""
        own, error = choice.keys(chosen), self._in_float8(placed.plan, choice, chosen).point.predicted
        words = f"the {self.prices.sensitivity.of}'s error of {error:.1e}"
        rules = product_rules(self._nodes, own, self.products, self.recipe, words, gpu)
        rules = replace((placed.rules or OpList()).merged(rules), name="tuned")
        found = Found.of("tuned", self.complete(rules).plan, rules)
        return replace(found, point=replace(found.point, **self._gains(own)))


# What each product gains and what its operands cost, in bytes that a GPU moves in that time: the unit of placements, so
# that an error has one price for both.

_QUANTISE = 3  # bytes that quantising moves for an element: 2 are read, 1 is written
_OPERANDS = {  # of each product: the left and the right one, and where the operator is handed it quantised
    Product.OUTPUT: (("input", "input_forward"), ("weight", "weight_forward")),
    Product.INPUT_GRADIENT: (("gradient", ""), ("weight", "weight_backward")),
    Product.WEIGHT_GRADIENT: (("gradient", ""), ("input", "input_backward")),
}


def product_of(
    node: PlannedNode, product: Product, error: float, sizes: Sequence[int], made: fx.Node | None, gpu: Gpu
) -> FloatProduct:
    """Return a product of a node that is planned in float8, with what it gains by the roofline of a GPU.

    The ``error`` is relative, and ``sizes`` are M, N and K, ``[M, K] @ [K, N]`` being the output's product. The
    arguments of ``made``, the node of the converted graph, say which values are shared; None: none are.
    """
    m, n, k = sizes
    elements = {"input": m * k, "weight": n * k, "gradient": m * n}
    operands = _OPERANDS[product]
    read = sum(elements[operand] for operand, _ in operands)
    written = sum(elements.values()) - read
    is_fast = node.float8 is not None and RECIPES[node.float8.recipe].capability is not None
    rates = ((2, gpu.peak(tensor_cores=True)), (1, gpu.peak(tensor_cores=True, in_float8=True)))
    moved = [max(2 * m * n * k / peak * gpu.bandwidth, size * read + 2 * written) for size, peak in rates]
    gain = max(0.0, moved[0] - moved[1]) if is_fast else 0.0
    reads: dict[Hashable, float] = {}
    layouts = RECIPES[node.float8.recipe].layouts[product] if node.float8 is not None else ()
    for (operand, given), layout in zip(operands, layouts, strict=True):
        shared: Any = argument(made, given) if made is not None and given else None
        key = shared.name if isinstance(shared, fx.Node) else (node.name, operand, layout)
        reads[key] = float(_QUANTISE * elements[operand])
    return FloatProduct(node, product, 2 * m * n * k, error**2, gain, reads)


# Say chosen products as rules: an entry for each module, with the parts of the error.


def product_rules(
    nodes: Sequence[PlannedNode],
    chosen: Collection[object],
    products: Sequence[FloatProduct],
    recipe: str,
    error: str,
    gpu: Gpu | None = None,
) -> OpList:
    """Return an entry for each module and op whose products could run in float8.

    In the plan of ``nodes`` all products that can run in float8 do; those with the keys ``chosen`` shall. Reasons tell
    the products' parts of ``error``, which is in words, and, if the rates of a GPU decided, where quantising alone
    takes longer than a product gains.
    """
    parts: dict[object, list[FloatProduct]] = {}
    for one in products:
        parts.setdefault(one.key, []).append(one)
    entries: list[dict[str, Any]] = []
    for group in dict.fromkeys(group_of(node) for node in nodes if node.float8 is not None and node.float8.products):
        own = [product for product in Product if (group, product) in chosen]
        told = {
            p: f"{p} {math.sqrt(sum(one.error for one in parts[group, p])):.1e}" for p in Product if (group, p) in parts
        }
        inside, outside = (", ".join(s for p, s in told.items() if (p in own) is is_in) for is_in in (True, False))
        said = [f"{words} {part}" for words, part in (("adds", inside), ("would add", outside)) if part]
        slow = [_slow(p, parts[group, p], gpu) for p in told if p not in own and gpu is not None]
        entries.append(
            {
                "path": group[0] or "re:^$",
                "ops": [group[1]],
                "float8": {"recipe": recipe, "products": [product.value for product in own]} if own else False,
                "reason": "; ".join(
                    [f"tuned: {' and '.join(said)} to {error}" if said else "tuned: not measured", *filter(None, slow)]
                ),
            }
        )
    ops = sorted({op for entry in entries for op in entry["ops"]})
    return OpList.of({"float8": [{"ops": ops, "products": []}], "modules": entries} if ops else {}, name="tuned")


def _slow(product: Product, parts: Sequence[FloatProduct], gpu: Gpu) -> str:
    """Say that quantising takes longer than a product gains; empty if it does not."""
    gain, cost = sum(one.gain for one in parts), sum(sum(one.reads.values()) for one in parts)
    if cost <= gain:
        return ""
    saves, costs = (f"{1e6 * moved / gpu.bandwidth:.2g} µs" for moved in (gain, cost))
    return f"{product} saves {saves} by the rates of {gpu.name}, and quantising for it alone costs {costs}"


_MOST_REASONS = 3  # that an error names
