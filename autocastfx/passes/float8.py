"""The pass that computes matrix products in float8 where the op list says so, after all casts are in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autocastfx.errors import OpListError, UnsupportedError
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import (
    Origin,
    Use,
    argument,
    captured_behind,
    example,
    place_like,
    set_origin,
    tensors,
    uses,
)
from autocastfx.passes.casts import PlannedDtypes
from autocastfx.passes.state import Pass, Settings, State
from autocastfx.plan.plan import Decision, In16Bits, NoFloat8, PlannedFloat8, Precision, WhyNoFloat8
from autocastfx.policy.float8 import (
    OPERANDS,
    PREPARED,
    RECIPES,
    Float8Choice,
    Layout,
    Operands,
    Product,
)
from autocastfx.runtime.operators.float8 import float8_linear, missing_products, quantize

# Refuse float8 rules that a whole conversion cannot follow.


def check_float8(settings: Settings, device: torch.device) -> None:
    """Refuse a list's float8 rules where nothing could follow them, or where gradients would overflow unseen.

    Args:
        settings: of the conversion.
        device: that the graph will run on.

    Raises:
        OpListError: gradients would be float16, or the list follows torch.autocast's dispatch; with the rule's place.
        UnsupportedError: the model is 16-bit already, or the device has no float8 products.
    """
    own = settings.op_list.float8
    wanted = [r for r in own if r.effect.products != () and r.device in ("", device.type)]
    if not wanted:
        return
    name, rule = settings.op_list.name, wanted[0]
    if settings.is_low_model:
        raise UnsupportedError(
            f"the op list {name} has float8 rules, and the model's parameters are {settings.low_name} already: convert "
            "the float32 model, or give a list without float8."
        )
    if settings.op_list.placement == "follow":
        raise OpListError(
            f"{rule.subject!r} cannot be in the list {name}, which follows torch.autocast's dispatch: extend another.",
            rule.source,
        )
    backward = next((r for r in wanted if r.effect.products != (Product.OUTPUT,)), None)
    if settings.low != torch.bfloat16 and backward is not None:
        raise OpListError(
            f"{backward.subject!r} asks for float8 in backward, and {settings.low_name} gradients are multiplied by a "
            "loss scale, which float8 does not take: convert with dtype='bfloat16', or write products: [output].",
            backward.source,
        )
    for real in (r for r in wanted if not r.effect.emulate):
        _check_products(f"{real.source}: {real.subject!r}", device, real.effect.recipe or Float8Choice.recipe)


def _check_products(needing: str, device: torch.device, recipe: str) -> None:
    if why := missing_products(device, recipe):
        raise UnsupportedError(
            f"{needing} needs float8 products, and {device} has none: {why}. Leave float8 out, "
            "or write emulate: true for products in float32 of the float8 numbers, which are slow."
        )


# Decide which products run in float8. Nothing is edited.


@dataclass(frozen=True)
class _Deciding:
    settings: Settings
    state: State
    planned: PlannedDtypes
    leads: Set[fx.Node]  # nodes from which a product is computed
    device: torch.device

    def all(self) -> Iterator[tuple[fx.Node, PlannedFloat8]]:
        """One entry for each op that float8 rules may be for, also where all its products stay in 16 bits."""
        for node, placement in self.state.placements.items():
            operands = OPERANDS.get(self.state.ops[node])
            if operands is None or placement.run is Precision.CAPTURED:
                continue
            choice = self.settings.matcher.float8_of(node)
            if choice is None:
                yield node, _none(Float8Choice(), NoFloat8.NO_RULE.because())
            elif choice.products and (why := self._why_not(node, operands, choice)) is not None:
                yield node, _none(choice, why)
            else:
                if choice.in_float8 and not choice.emulate:  # the settings of several rules may make it up
                    _check_products(f"{choice.source}: {node.name!r}", self.device, choice.recipe)
                in_16 = (In16Bits(p, _why_out(p, choice)) for p in Product if p not in choice.in_float8)
                yield node, PlannedFloat8(choice.recipe, choice.in_float8, tuple(in_16), choice.emulate)

    def _why_not(self, node: fx.Node, operands: Operands, choice: Float8Choice) -> WhyNoFloat8 | None:
        """Why no product of ``node`` can run in float8; None if all can."""
        if self.state.placements[node].run is not Precision.LOW:
            return NoFloat8.NOT_LOW.because()
        for name in ("beta", "alpha"):
            if argument(node, name) not in (None, 1):
                return NoFloat8.OTHER_FORM.because(name)
        reads = {use.argument: use for use in uses(node)}
        for name in (operands.input, operands.weight):
            if not self._is_low(node, reads[name]):
                return NoFloat8.READS_FLOAT32.because(name)
        weight = reads[operands.weight].node
        if len(_shape(weight)) != 2:
            return NoFloat8.OTHER_SHAPE.because(operands.weight, len(_shape(weight)), 2)
        if operands.transposes and not self._is_parameter(weight):
            return NoFloat8.NO_WEIGHT.because(operands.weight)
        bias = reads.get(operands.bias)
        if bias is not None and len(_shape(bias.node)) != 1:
            return NoFloat8.OTHER_SHAPE.because(operands.bias, len(_shape(bias.node)), 1)
        if not choice.last and node not in self.leads:
            return NoFloat8.LAST.because()
        return self._of_sizes(reads[operands.input].node, weight, operands, choice)

    def _is_low(self, node: fx.Node, use: Use) -> bool:
        source = captured_behind(use.node)
        to = self.planned.read(node, use, source)
        return (self.planned.stores(source) if to is None else (to,)) == (self.settings.low,)

    def _is_parameter(self, read: fx.Node) -> bool:
        source = captured_behind(read)
        return source.op == "get_attr" and str(source.target) in self.state.parameters

    def _of_sizes(
        self, source: fx.Node, weight: fx.Node, operands: Operands, choice: Float8Choice
    ) -> WhyNoFloat8 | None:
        rows, columns = _shape(weight)[::-1] if operands.transposes else _shape(weight)
        given = {"M": _shape(source)[:-1], "N": (rows,), "K": (columns,)}
        sizes = {
            name: None if None in map(example, factors) else math.prod(map(example, factors))
            for name, factors in given.items()
        }
        multiple = RECIPES[choice.recipe].multiple
        for name, size in sizes.items():
            if size is None and (name != "M" or dict(choice.least).get(name)):
                return NoFloat8.UNKNOWN_SIZE.because(name)
            if size is not None and name != "M" and size % multiple:
                return NoFloat8.ODD_SIZE.because(name, size, multiple)
        for name, least in choice.least:
            if (size := sizes[name]) is not None and size < least:
                return NoFloat8.TOO_SMALL.because(name, size, least)
        return None


def _none(choice: Float8Choice, why: WhyNoFloat8) -> PlannedFloat8:
    return PlannedFloat8(choice.recipe, (), tuple(In16Bits(product, why) for product in Product))


def _why_out(product: Product, choice: Float8Choice) -> WhyNoFloat8:
    """Why a product that could run in float8 does not."""
    if product in choice.products:
        return NoFloat8.BY_RECIPE.because(choice.recipe)
    said = f" ({choice.reason})" if choice.reason else ""
    return NoFloat8.BY_RULE.because(f"the rule at {choice.source.portable}{said}" if choice.source else f"a rule{said}")


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(tensors(captured_behind(node))[0].shape)  # casts have no abstract values yet


def _leads(graph: fx.Graph, decisions: Mapping[fx.Node, Decision]) -> set[fx.Node]:
    """The nodes from which a product is computed."""
    leads: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in leads or (user in decisions and decisions[user].category.is_low) for user in node.users):
            leads.add(node)
    return leads


# Edit the graph.


@dataclass
class _Rewriting:
    """Puts quantised values into a graph, each once for a value and a layout, and products that read them."""

    graph: fx.Graph
    written: Set[fx.Node]  # values that are written into, and quantised anew for each reader
    with_backward: bool
    made: dict[object, fx.Node] = field(default_factory=dict[object, fx.Node])

    def rewrite(self, node: fx.Node, operands: Operands, planned: PlannedFloat8) -> None:
        """Let ``node`` compute its products as planned."""
        x, weight = argument(node, operands.input), argument(node, operands.weight)
        bias = argument(node, operands.bias) if operands.bias else None
        if operands.transposes:
            weight = self._transposed(weight, node)
        run = [p for p in planned.products if self.with_backward or p is Product.OUTPUT]
        layouts = RECIPES[planned.recipe].layouts
        wanted = [(x if name.startswith("input") else weight, *of) for name, of in PREPARED.items()]
        quantized = [self._quantized(v, layouts[p][i], planned.recipe, node) if p in run else [] for v, p, i in wanted]
        node.target = float8_linear
        node.args = (x, weight, bias, *quantized, planned.recipe, " ".join(planned.products))
        node.kwargs = {"emulate": True} if planned.emulate else {}

    def _transposed(self, weight: fx.Node, reader: fx.Node) -> fx.Node:
        if (weight, "t") not in self.made:
            self.made[weight, "t"] = self._make(torch.ops.aten.t.default, (weight,), "t", "transposed", weight, reader)
        return self.made[weight, "t"]

    def _quantized(self, value: fx.Node, layout: Layout, recipe: str, reader: fx.Node) -> fx.Node:
        args = (value, *RECIPES[recipe].quantizing(layout))
        key = (args, reader if captured_behind(value) in self.written else None)
        if key not in self.made:
            self.made[key] = self._make(quantize, args, f"float8_{layout}", layout.value, value, reader)
        return self.made[key]

    def _make(
        self, target: Any, args: tuple[Any, ...], suffix: str, rule: str, value: fx.Node, reader: fx.Node
    ) -> fx.Node:
        with self.graph.inserting_before(reader):
            made = self.graph.create_node("call_function", target, args, {}, f"{captured_behind(value).name}_{suffix}")
        place_like(made, value)
        set_origin(made, Origin(UseFloat8.made_by, rule, captured_behind(value).name))
        return made


class UseFloat8(Pass):
    """Computes matrix products in float8, by operators of this package that read quantised values."""

    name = "use float8"
    made_by = "float8"

    def __call__(self, state: State) -> State:
        """The state, its graph changed, with what was decided.

        Raises:
            OpListError: two rules fit an op equally well and contradict each other.
            UnsupportedError: a product would run in float8, and the device has none by its recipe.
        """
        settings = self.settings
        if state.planned is None:  # no casts were asked for
            return state
        leads = _leads(state.graph, state.classification.decisions)
        planned = dict(_Deciding(settings, state, state.planned(state), leads, torch.device(settings.device)).all())
        written = alias_sets(state.graph, settings.ports.written).keys()
        rewriting = _Rewriting(state.graph, written, settings.mode != "eval")
        for node, one in planned.items():
            if one.products:
                rewriting.rewrite(node, OPERANDS[state.ops[node]], one)
        return replace(state, float8=planned)
