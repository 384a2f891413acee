"""The cut with errors against brute force, and the predicted error of a placement."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import autocastfx
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_float32, stand_for, uses
from autocastfx.graph.walk import key_of
from autocastfx.passes.analysis.node_errors import NodeEffectMap, equal_terms, product_terms
from autocastfx.passes.analysis.place_cheaply import bytes_moved, place_cheaply
from autocastfx.passes.analysis.units import Ports, units_of
from autocastfx.plan.plan import UNLISTED, Cause, Decision, Placement, Precision, Recomposed, Why
from autocastfx.plan.sensitivity import OUTPUT, Effect, rms
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.rule import Category
from benchmarks.models.tuned import MODELS
from tests.decided import traced
from tests.helpers import examples
from tests.passes.random_graphs import KINDS, build, near, outputs

PORTS = Ports(autocastfx.OpList(), replace(load_kernel_facts(), mixed_args=frozenset()))
OPEN = [kind for kind in KINDS if kind not in ("keep", "promote", "join", "in place", "view")]
steps = st.lists(st.tuples(st.sampled_from(OPEN), near, near), min_size=3, max_size=7)


def effects(graph: fx.Graph, generator: random.Random) -> NodeEffectMap:
    """Random effects, whose squares are whole numbers of bytes."""
    found: dict[fx.Node, Effect] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "output") or op_name(node) == "getitem":
            continue
        reads = [u.node.name for u in uses(node) if is_float32(u.node)]

        def some(reads: list[str] = reads) -> dict[str, tuple[float, ...]]:
            return {name: (float(generator.choice([0, 1, 2, 3, 5])),) for name in reads}

        key = (OUTPUT, OUTPUT) if node.op == "output" else (node.name, op_name(node))
        computes = () if node.op == "output" else (float(generator.choice([0, 1, 2, 4])),)
        found[node] = Effect("train", *key, "", computes, {} if node.op == "output" else some(), some())
    return NodeEffectMap(found)


def squares(graph: fx.Graph, errors: NodeEffectMap, placements: dict[fx.Node, Placement]) -> int:
    """The squared errors of a placement, written down again."""
    paid = 0.0

    def stored_low(value: fx.Node) -> bool:
        while op_name(value) == "getitem":
            value = value.all_input_nodes[0]
        return value in placements and placements[value].store is Precision.LOW

    for node, effect in errors.effects.items():
        low = node in placements and placements[node].run is Precision.LOW
        paid += rms(effect.computes) ** 2 if low else 0
        for value in {u.node for u in uses(node) if is_float32(u.node)}:
            if low and not stored_low(value):
                paid += rms(effect.reads[value.name]) ** 2
            if not low and stored_low(value):
                paid += rms(effect.returns[value.name]) ** 2
    return round(paid)


@examples(150, 500)
@given(steps, outputs, st.integers(0, 1000), st.sampled_from([0.0, 1.0, 4.0, 30.0]))
def test_the_cut_with_errors_is_what_brute_force_finds(
    steps: list[tuple[str, int, int]], outputs: list[int], seed: int, price: float
) -> None:
    graph, decisions = build(steps, outputs)
    units, errors = units_of(graph, decisions, PORTS), effects(graph, random.Random(seed))
    measured = frozenset(errors.effects)
    placed = place_cheaply(
        graph, decisions, units, measured=measured, priced=list(errors.terms(units, price)), rounds=True
    )

    def cost(placements: dict[fx.Node, Placement]) -> int:
        return bytes_moved(graph, placements, units) + round(price * squares(graph, errors, placements))

    every = list(units)
    least = min(
        cost(units.placements(decisions, dict.fromkeys(low, Cause(Why.ALLOW)), dict.fromkeys(every, Cause(Why.DENY))))
        for size in range(len(every) + 1)
        for low in itertools.combinations(every, size)
    )
    assert cost(placed) == least
    for node, placement in placed.items():
        if op_name(node) != "getitem" and placement.run is not Precision.CAPTURED:
            assert placement.because == Cause(Why.MEASURED)


def chain() -> tuple[fx.Graph, list[fx.Node], NodeEffectMap]:
    graph, decisions = build([("allow", 0, 0), ("infer", 0, 0)], [0])
    nodes = list(decisions)
    first, second = (node.name for node in nodes)
    source = nodes[0].all_input_nodes[0].name
    found = {
        nodes[0]: Effect("train", first, "linear", "", (3.0, 0.0), {source: (0.0, 4.0)}, {source: (9.0, 9.0)}),
        nodes[1]: Effect("train", second, "tanh", "", (1.0, 1.0), {first: (5.0, 5.0)}, {first: (0.0, 2.0)}),
    }
    return graph, nodes, NodeEffectMap(found)


def test_what_comes_back_from_the_output_is_the_whole_graphs() -> None:
    graph, (product, _), errors = chain()
    whole = Effect("train", OUTPUT, OUTPUT, "", (), {}, {product.name: (1.0, 0.0)})
    known = {key_of(product): errors.effects[product], (OUTPUT, OUTPUT, ""): whole}
    assert NodeEffectMap.of(graph, known).effects == {product: known[key_of(product)], graph.output_node(): whole}
    assert NodeEffectMap.of(graph, {}).effects == {}
    assert NodeEffectMap.of(graph, known, "region/").effects == {}, "a sub-graph has another output"


def placement(run: Precision) -> Placement:
    return Placement(run, run, Cause(Why.ALLOW))


def test_errors_of_a_placement_add_up_as_signatures() -> None:
    _, (product, activation), errors = chain()
    low, full = placement(Precision.LOW), placement(Precision.FLOAT32)
    assert errors.of_nodes({product: full, activation: full}) == {}
    both = errors.of_nodes({product: low, activation: low})
    assert both == {product: (3.0, 4.0), activation: (1.0, 1.0)}  # what it reads is 16-bit already
    mixed = errors.of_nodes({product: low, activation: full})
    assert mixed == {product: (3.0, 4.0), activation: (0.0, 2.0)}  # its gradient is rounded on the way back
    assert errors.of_nodes({product: full, activation: low}) == {activation: (6.0, 6.0)}


def test_a_node_that_stands_for_several_reads_as_they_do() -> None:
    graph, (product, activation), errors = chain()
    beyond = replace(errors.effects[product], overflows=True)
    errors = replace(errors, effects={**errors.effects, product: beyond})
    with graph.inserting_after(activation):
        made = graph.call_function(torch.ops.aten.gelu.default, (product.all_input_nodes[0],))
    stand_for(made, activation.name)
    activation.replace_all_uses_with(made)
    graph.erase_node(activation)
    graph.erase_node(product)
    after = errors.after(graph, [Recomposed("gelu", made.name, (product.name, activation.name))])
    (effect,) = after.effects.values()
    assert effect.computes == (1.0, 1.0)
    assert effect.overflows
    assert effect.reads == {made.all_input_nodes[0].name: (0.0, 4.0)}
    assert activation.name in after.names(made)  # under which later reads know it


def test_a_value_that_stands_for_others_is_read_under_all_their_names() -> None:
    _, (product, activation), errors = chain()
    effect = errors.effects[activation]
    merged = replace(effect, reads={product.name: (5.0, 5.0), "again": (1.0, 2.0)}, returns={"again": (0.0, 2.0)})
    stand_for(product, "again")
    errors = replace(errors, effects={activation: merged})
    low, full = placement(Precision.LOW), placement(Precision.FLOAT32)
    assert errors.of_nodes({product: full, activation: low}) == {activation: (7.0, 8.0)}
    assert errors.of_nodes({product: low, activation: full}) == {activation: (0.0, 2.0)}


@pytest.mark.parametrize("name", ["GPT-2 2x64", "Llama 2x64", "T5 2+2x64", "BERT 2x64"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_effect_on_a_read_finds_its_value(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged, dropped and replaced nodes, those of regions, and dropout, which evaluation does not have."""
    lost: list[str] = []
    counted = [0]
    of_nodes = NodeEffectMap.of_nodes

    def checked(errors: NodeEffectMap, placements: dict[fx.Node, Placement]) -> object:
        for node, effect in errors.effects.items():
            known = {name for use in uses(node) for name in errors.names(use.node)}
            counted[0] += 1
            lost.extend(f"{node} reads {read}" for read in {**effect.reads, **effect.returns} if read not in known)
        return of_nodes(errors, placements)

    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build().train()
    batch = next(iter(case.batches(0)))
    args, kwargs = case.arguments(batch)
    found = autocastfx.sensitivity(model, [batch], case.loss, inputs=case.inputs, probes=1)
    monkeypatch.setattr(NodeEffectMap, "of_nodes", checked)
    autocastfx.convert(model.train(mode == "train"), args, kwargs or None, sensitivity=found)
    assert counted[0] > 30
    assert lost == []  # and no warning that the measurement is of another model


def test_units_of_one_module_and_op_are_alike() -> None:
    graph, decisions = build([("allow", 0, 0), ("infer", 0, 0), ("allow", 0, 0)], [0])
    units = units_of(graph, decisions, PORTS)
    products = [units.of[node] for node in decisions if op_name(node) == "linear"]
    assert [(term.lows, term.float32s) for term in equal_terms(units)] == [
        ((products[1],), (products[0],)),
        ((products[0],), (products[1],)),
    ]


def test_a_float32_product_costs_its_operations() -> None:
    graph, decisions = build([("allow", 0, 0), ("infer", 0, 0)], [0])
    units = units_of(graph, decisions, PORTS)
    (product,) = (node for node in decisions if op_name(node) == "linear")
    (term,) = product_terms(units, PORTS.facts.reduces, 0.5)
    rows, depth = product.meta["val"].numel(), product.args[0].meta["val"].shape[-1]
    assert (term.cost, term.lows, term.float32s) == (rows * depth, (), (units.of[product],))


def test_what_adds_up_elements_takes_no_longer_in_float32() -> None:
    graph = traced(lambda x: x.sum(-1), torch.ones(4, 4))
    (reduction,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    units = units_of(graph, {reduction: Decision(Category.INFER, "", UNLISTED)}, PORTS)
    assert PORTS.facts.reduces["sum"] == "elements"
    assert list(product_terms(units, PORTS.facts.reduces, 0.5)) == []
