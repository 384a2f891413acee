"""Search for the products that run in float8: of the least error at a share of operations, or of the least time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autocastfx.errors import SensitivityError
from autocastfx.graph.node import argument
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.plan_search import Found, Group, Limit, PlanSearch, Point, group_of
from autocastfx.numerics.product_choice import Candidate, Choice
from autocastfx.plan.plan import NoFloat8, PlannedFloat8, PlannedNode, Precision
from autocastfx.policy.float8 import MULTIPLE, OPERANDS, RECIPES, Product
from autocastfx.policy.op_list import OpList
from autocastfx.report.lint.roofline import Gpu

# What each product gains and what its operands cost, in bytes that a GPU moves in that time: the unit of placements, so
# that an error has one price for both.

_QUANTISE = 3  # bytes that quantising moves for an element: 2 are read, 1 is written
_OPERANDS = {  # of each product: the left and the right one, and where the operator is handed it quantised
    Product.OUTPUT: (("input", "input_forward"), ("weight", "weight_forward")),
    Product.INPUT_GRADIENT: (("gradient", ""), ("weight", "weight_backward")),
    Product.WEIGHT_GRADIENT: (("gradient", ""), ("input", "input_backward")),
}


@dataclass(frozen=True)
class FloatProduct:
    """A product of a node that can run in float8.

    Attributes:
        node: of the plan.
        product: which of its three.
        flops: its operations.
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


def product_of(
    node: PlannedNode, product: Product, error: float, sizes: Sequence[int], made: fx.Node | None, gpu: Gpu
) -> FloatProduct:
    """Return a product of a node, with what it gains by the roofline of a GPU.

    Args:
        node: planned in float8.
        product: one of its products.
        error: the relative error in float8.
        sizes: M, N and K, ``[M, K] @ [K, N]`` being the output's product.
        made: the node of the converted graph, whose arguments say which values are shared; None: none are.
        gpu: its rates.
    """
    m, n, k = sizes
    elements = {"input": m * k, "weight": n * k, "gradient": m * n}
    operands = _OPERANDS[product]
    read = sum(elements[operand] for operand, _ in operands)
    written = sum(elements.values()) - read
    rates = ((2, gpu.peak(tensor_cores=True)), (1, gpu.peak(tensor_cores=True, in_float8=True)))
    moved = [max(2 * m * n * k / peak * gpu.bandwidth, size * read + 2 * written) for size, peak in rates]
    reads: dict[Hashable, float] = {}
    for (operand, given), layout in zip(operands, _layouts(node, product), strict=True):
        shared: Any = argument(made, given) if made is not None and given else None
        key = shared.name if isinstance(shared, fx.Node) else (node.name, operand, layout)
        reads[key] = float(_QUANTISE * elements[operand])
    return FloatProduct(node, product, 2 * m * n * k, error**2, max(0.0, moved[0] - moved[1]), reads)


def _layouts(node: PlannedNode, product: Product) -> Sequence[object]:
    return RECIPES[node.float8.recipe].layouts[product] if node.float8 is not None else ()


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

    Args:
        nodes: of a plan in which all products that can run in float8 do.
        chosen: the keys of those that shall.
        products: those that were measured.
        recipe: of them, by name.
        error: of which the reasons tell the products' parts, in words.
        gpu: whose rates decided; the reasons tell where quantising alone takes longer than a product gains.
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


_MOST_MEASURED = 5
_MOST_REASONS = 3  # that an error names
_HALVINGS = 6
_DECADES = range(-4, 7)  # of the price of an error, around that at which the start's costs what all its bytes do
_MORE = 1.02  # times the error that is predicted for one plan, to look for another


@dataclass
class Float8Search:
    """The search for a placement and for products in float8.

    Placement and selection are made once, one after the other, at one price of an error. A product in float8 reads the
    16-bit values that it would read anyhow, for each is quantised from its 16-bit version, and it runs only where
    its node runs in 16 bits: the selection adds and saves no cast, and no term of the placement's cut depends on it.
    Another round would find the same placement.

    Attributes:
        search: of placements, from the list to start from.
        recipe: of products, by name.
        gpu: whose rates say what a product gains.
        products: those that the list lets run in float8, and that were measured.
    """

    search: PlanSearch
    recipe: str
    gpu: Gpu
    products: list[FloatProduct] = field(init=False)

    def __post_init__(self) -> None:
        ops = sorted({node.op for node in self.search.start.nodes if node.op in OPERANDS})
        rule = OpList.of({"float8": [{"ops": ops, "recipe": self.recipe}]} if ops else {})
        variant = self.search.complete(rule)
        self._nodes, effects = variant.plan.nodes, self.search.effects
        made = {node.name: node for node in variant.graph.nodes}
        self.products, self._flops, self._kept_out = [], 0, Counter[str]()
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

    def result(self, judge: TargetDistance, limit: Limit, started: Point) -> tuple[Found, list[Point]]:
        """Choose products, and for a limit of errors the placement; measure.

        For a share, the placement is that of the list to start from, and the plan is the one of the least error. For a
        limit of errors it is the one of the least time, by the roofline.

        Returns:
            The best plan within the limit, with its casts, and the points of all that were looked at.

        Raises:
            SensitivityError: no plan keeps the limit.
        """
        kept = [self._started(started)]
        points = [kept[0].point, *self._cuts()]
        target = limit.error or 0.0
        for _ in range(_MOST_MEASURED):
            found = self._at_share(limit.share) if limit.share is not None else self._at_error(target)
            if found is None:
                break
            found = replace(found, point=replace(found.point, measured=self.search._measured(found, judge)))
            points.append(found.point)
            kept.append(found)
            if limit.share is not None or limit.keeps(found.point):
                break
            target *= min(1 / _MORE, found.point.predicted / found.point.error)
        kept = [one for one in kept if limit.keeps(one.point)]
        if not kept:
            raise SensitivityError(f"no plan keeps the budget ({limit}): the nearest has {points[-1]}.")
        if limit.share is not None:
            return min(kept, key=lambda one: one.point.error), points
        return min(kept, key=lambda one: one.point.bytes - one.point.saved * self.gpu.bandwidth), points

    def _started(self, started: Point) -> Found:
        """The plan of the list to start from, with what it runs in float8 itself."""
        plan = self.search.complete(OpList()).plan
        own = {(group_of(n), p) for n in plan.nodes if n.float8 is not None for p in n.float8.products}
        point = replace(started, predicted=plan.error or 0.0, **self._gains(own))
        return Found(point, plan, OpList(name="tuned"))

    def _choice(self, *, by_flops: bool, low: Collection[str] | None = None) -> tuple[list[object], Choice]:
        """The products of nodes that run in 16 bits, by what a rule can say: keys, and what to choose from."""
        groups: dict[object, list[FloatProduct]] = {}
        for one in self.products:
            if low is None or one.node.name in low:
                groups.setdefault(one.key, []).append(one)
        costs = {} if by_flops else {value: cost for one in self.products for value, cost in one.reads.items()}
        candidates = [
            Candidate(
                sum(one.flops if by_flops else one.gain for one in own),
                sum(one.error for one in own),
                tuple(dict.fromkeys(value for one in own for value in one.reads)),
            )
            for own in groups.values()
        ]
        return list(groups), Choice(candidates, costs)

    def _gains(self, chosen: Collection[object]) -> dict[str, float]:
        """The share and the time that chosen products save, as a point has them."""
        keys, choice = self._choice(by_flops=False)
        flops = sum(one.flops for one in self.products if one.key in chosen)
        worth = choice.worth([i for i, key in enumerate(keys) if key in chosen])
        return {"share": flops / self._flops if self._flops else 0.0, "saved": worth / self.gpu.bandwidth}

    def _cuts(self) -> list[Point]:
        """Points of other shares, with the placement of the list to start from."""
        keys, choice = self._choice(by_flops=True)
        every, start = range(len(keys)), self.search.start
        unit = choice.worth(every) / choice.error(every) if choice.error(every) else 0.0
        cuts = dict.fromkeys(choice.at(unit * 10.0 ** (half / 2)) for half in _DECADES)
        return [
            Point(
                "cut",
                start.traffic.moved,
                math.hypot(start.error or 0.0, math.sqrt(choice.error(cut))),
                **self._gains({keys[i] for i in cut}),
            )
            for cut in cuts
        ]

    def _at_share(self, share: float) -> Found:
        if not self._flops:
            raise SensitivityError(
                "the model has no product that can run in float8: one of a weight, whose N and K are multiples of "
                f"{MULTIPLE}. Leave float8 and share out."
            )
        keys, choice = self._choice(by_flops=True)
        chosen = choice.least_error(share * self._flops * (1 - 1e-9))
        if chosen is None:
            most, kept_out = choice.worth(range(len(keys))) / self._flops, self._kept_out.most_common(_MOST_REASONS)
            said = "; ".join(f"{flops / self._flops:.0%}: {why}" for why, flops in kept_out)
            others = len(self._kept_out) - len(kept_out)
            more = f"; and {others} other reasons" if others else ""
            raise SensitivityError(
                f"{share:.0%} of products in float8 are more than can be: {most:.0%}, by operations. The list "
                f"{self.search.converter.op_list.name} keeps out {said}{more}. Give a smaller share or another op_list."
            )
        error = math.hypot(self.search.start.error or 0.0, math.sqrt(choice.error(chosen)))
        return self._said(OpList(), {keys[i] for i in chosen}, error, None)

    def _at_error(self, error: float) -> Found | None:
        """The plan of the least time within a predicted error, at the lowest price that keeps it; None if none does."""
        start = self.search.start
        unit = start.traffic.moved / max(start.error or 0.0, 1e-12) ** 2
        lower, price = 0.0, unit * 10.0**_DECADES.start
        while self._priced(price) > error:
            lower, price = price, 10 * price
            if price > unit * 10.0**_DECADES.stop:
                return None
        for _ in range(_HALVINGS if lower else 0):
            middle = math.sqrt(lower * price)
            lower, price = (middle, price) if self._priced(middle) > error else (lower, middle)
        said = self.search._said(self.search.plans[price])
        keys, choice = self._choice(by_flops=False, low=_low(said.plan.nodes))
        own = said.plan.error or 0.0
        chosen = choice.most_worth(max(0.0, error**2 - own**2))
        error = math.hypot(own, math.sqrt(choice.error(chosen)))
        return self._said(said.rules or OpList(), {keys[i] for i in chosen}, error, self.gpu)

    def _priced(self, price: float) -> float:
        """The predicted error of the placement and the products that are best at a price of an error."""
        plan = self.search._at(price)
        _, choice = self._choice(by_flops=False, low=_low(plan.nodes))
        return math.hypot(plan.error or 0.0, math.sqrt(choice.error(choice.at(price))))

    def _said(self, placed: OpList, chosen: Collection[object], error: float, gpu: Gpu | None) -> Found:
        words = f"the {self.search.prices.sensitivity.of}'s error of {error:.1e}"
        rules = placed.merged(product_rules(self._nodes, chosen, self.products, self.recipe, words, gpu))
        plan = self.search.complete(rules).plan
        return Found(
            Point("tuned", plan.traffic.moved, plan.error or 0.0, **self._gains(chosen)),
            plan,
            replace(rules, name="tuned"),
        )


def _low(nodes: Sequence[PlannedNode]) -> set[str]:
    return {node.name for node in nodes if node.placement.run is Precision.LOW}
