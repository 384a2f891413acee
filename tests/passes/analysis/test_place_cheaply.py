"""The cut against brute force on random graphs, and what it does on small ones (TensorFlow's rule: test_place.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx

import autocastfx
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, has_float32, origin, producer, uses
from autocastfx.passes.analysis.place_cheaply import Fold, bytes_moved, place_cheaply
from autocastfx.passes.analysis.units import Ports, Unit, Units, units_of
from autocastfx.passes.casts import CastStyle, insert_casts
from autocastfx.passes.insert_casts import Bounds, PlacedDtypes
from autocastfx.passes.verify import verify
from autocastfx.plan.plan import Decision, Precision
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.rule import Category
from tests.decided import decided, rewritten
from tests.helpers import Function, examples, op_list, text
from tests.passes.random_graphs import build, outputs, reordered, steps

FACTS = load_kernel_facts()
WEIGHT = frozenset({"weight", "scale"})
UNMIXED = Ports(autocastfx.OpList(), replace(FACTS, mixed_args=frozenset()))
MIXED = Ports(autocastfx.OpList(), FACTS)
many = examples(150, 500)


def folding(graph: fx.Graph) -> dict[fx.Node, Fold]:
    """Of a softplus, which taints where it does not fold, a log_sigmoid, which does not, and what joins an input."""
    folds = [n for n in graph.nodes if op_name(n) in ("softplus", "log_sigmoid")]
    found = {n: Fold(tuple(n.all_input_nodes), taints=op_name(n) == "softplus") for n in folds}
    joins = [n for n in graph.nodes if op_name(n) == "cat" and any(r.op == "placeholder" for r in n.all_input_nodes)]
    return found | dict.fromkeys(joins, Fold((), taints=False))


def obeys(low: set[Unit], units: Units, folds: Mapping[fx.Node, Fold], keeps: bool, rounds: bool) -> bool:
    """The rules of placement, written down again, node by node."""
    folding = {u: folds[u.nodes[0]] for u in units if u.nodes[0] in folds and len(u.nodes) == 1}
    foldable = {u for u in folding if u.category in (Category.DENY, Category.PROMOTE)}
    parameters, outside = origins(units)

    def is_allow(unit: Unit) -> bool:
        return unit.category is Category.ALLOW

    def may_cast(unit: Unit) -> bool:
        is_infer = unit.category is Category.INFER
        return is_allow(unit) or (is_infer and (rounds or only_for(unit, units, keeps, is_allow)))

    for unit in units:
        if unit not in low and unit.category is Category.ALLOW:
            return False
    for unit in low:
        if unit.category in (Category.DENY, Category.KEEP) and unit not in foldable:
            return False
        reads = {u.node for n in unit.nodes for u in uses(n) if has_float32(u.node)}
        if unit in foldable:
            asked = set(folding[unit].reads)
            if not low.issuperset(readers(unit, units, keeps)):
                return False
        elif unit.category is Category.PROMOTE:
            asked = reads
        elif unit.category is Category.INFER:
            if rounds and not outside.isdisjoint(unit.nodes):
                return False
            scales = {read for read in parameters if read.target == "scale"}
            asked = set() if rounds else reads - (scales if only_for(unit, units, keeps, is_allow) else set())
        else:
            is_read_low = unit.category is not Category.CLEAR or only_for(unit, units, keeps, is_allow)
            asked = set() if is_read_low else reads
            asked -= parameters if only_for(unit, units, keeps, may_cast) else set()
        if not low.issuperset(map(units.stored, asked)):
            return False
    surely = {u for u in units if u.category is Category.DENY and u not in foldable}
    quiet = {u for u in foldable if not folds[u.nodes[0]].taints}
    tainted = spread({u for u in units if u.category is Category.DENY and u not in low} - quiet | surely, set())
    forced = spread(surely, set()) | {u for u in units if u.category is Category.KEEP}
    forced -= {u for u in forced if u.category is Category.CLEAR}
    reached = spread({u for u in units if u.category is Category.ALLOW} | foldable, forced)
    for unit in low:
        if unit.category in (Category.INFER, Category.PROMOTE) and unit in tainted:
            return False
        if unit.category is Category.INFER and unit not in reached:
            return False
    return True


def origins(units: Units) -> tuple[set[fx.Node], set[fx.Node]]:
    """The parameters and views of them; and what comes from outside, or is computed with such a value."""
    parameters, outside = set[fx.Node](), set[fx.Node]()
    for node in next(iter(units)).nodes[0].graph.nodes:
        if not has_float32(node):
            continue
        if node not in units.of and producer(node) not in units.of:
            (parameters if node.op == "get_attr" else outside).add(node)
            continue
        unit, reads = units.of[producer(node)], {u.node for u in uses(producer(node)) if has_float32(u.node)}
        if unit.category is Category.CLEAR and reads <= parameters:
            parameters.add(node)
        elif unit.category is Category.KEEP:
            outside |= set() if reads <= parameters else {node}
        elif unit.category.is_free and reads & outside:
            outside.add(node)
    return parameters, outside


def spread(starts: set[Unit], closed: set[Unit]) -> set[Unit]:
    found = set(starts)
    while True:
        more = {a for u in found for a in u.after if a.category.is_free and a not in closed} - found
        if not more:
            return found
        found |= more


def readers(unit: Unit, units: Units, keeps: bool) -> Iterator[Unit | None]:
    for node in (n for n in unit.nodes[0].graph.nodes for u in uses(n) if producer(u.node) in unit.nodes):
        if node.op == "output":
            if keeps:
                yield None
        elif node in units.of and units.of[node] is not unit:
            yield units.of[node]


def only_for(unit: Unit, units: Units, keeps: bool, chosen: Callable[[Unit], bool]) -> bool:
    read_by = list(readers(unit, units, keeps))
    return bool(read_by) and all(
        r is not None and (chosen(r) or (r.category is Category.CLEAR and only_for(r, units, keeps, chosen)))
        for r in read_by
    )


def least(
    graph: fx.Graph,
    decisions: dict[fx.Node, Decision],
    units: Units,
    folds: Mapping[fx.Node, Fold],
    keeps: bool,
    rounds: bool,
) -> int:
    every = list(units)
    costs = []
    for bits in itertools.product((False, True), repeat=len(every)):
        low = {u for u, is_low in zip(every, bits, strict=True) if is_low}
        if obeys(low, units, folds, keeps, rounds):
            placements = units.placements(decisions, dict.fromkeys(low, ""), dict.fromkeys(every, ""))
            costs.append(bytes_moved(graph, placements, units, keep_output_dtype=keeps))
    return min(costs)


READ_TWICE = [("allow", 0, 0), ("deny", 0, 0), ("infer", 2, 0), ("in place", 2, 0), ("deny", 0, 0), ("sum", 1, 1)]


@many
@given(steps, outputs, st.booleans(), st.booleans())
@example([*READ_TWICE, ("fold", 0, 0)], [0], False, True)  # one reader of what is mutated needs one cast
@example([("infer", 0, 0), ("allow", 0, 0), ("sum", 0, 1), ("sum", 0, 1)], [2], False, True)  # read by nothing
def test_the_cut_moves_as_few_bytes_as_brute_force_finds(
    steps: list[tuple[str, int, int]], outputs: list[int], keeps: bool, rounds: bool
) -> None:
    graph, decisions = build(steps, outputs)
    units, folds = units_of(graph, decisions, UNMIXED), folding(graph)
    placements = place_cheaply(
        graph, decisions, units, folds=folds, keep_output_dtype=keeps, parameters=WEIGHT, rounds=rounds
    )
    low = {units.of[n] for n in units.of if placements[n].run is Precision.LOW}
    assert obeys(low, units, folds, keeps, rounds)
    found = bytes_moved(graph, placements, units, keep_output_dtype=keeps)
    assert found == least(graph, decisions, units, folds, keeps, rounds)


@many
@given(steps, outputs, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(
    steps: list[tuple[str, int, int]], outputs: list[int], order: Random
) -> None:
    graph, decisions = build([s for s in steps if s[0] != "in place"], outputs)
    other, decided = reordered(graph, decisions, order)

    def placed(graph: fx.Graph, decisions: dict[fx.Node, Decision]) -> dict[str, tuple[Precision, Precision]]:
        units = units_of(graph, decisions, UNMIXED)
        found = place_cheaply(graph, decisions, units, folds=folding(graph))
        return {n.name: (p.run, p.store) for n, p in found.items()}

    assert placed(graph, decisions) == placed(other, decided)


@many
@given(steps, outputs, st.booleans(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_the_graph_is_as_placed_and_no_value_is_cast_twice(
    steps: list[tuple[str, int, int]], outputs: list[int], keeps: bool, low: torch.dtype
) -> None:
    graph, decisions = build(steps, outputs)
    units = units_of(graph, decisions, MIXED)
    placements = place_cheaply(graph, decisions, units, folds=folding(graph), keep_output_dtype=keeps)
    mutated = {n.name for n in units.storages}
    captured = {n: dtypes(n) for n in graph.nodes}
    in_dtype = {Precision.LOW: low, Precision.FLOAT32: torch.float32}
    planned = PlacedDtypes(placements, captured, lambda p: in_dtype.get(p, torch.float32), MIXED, keeps)
    bounds = Bounds.of(graph, frozenset(), WEIGHT)
    insert_casts(graph, planned, CastStyle("rewrite", low, alias_sets(graph, MIXED.written).keys(), bounds))
    verify(graph, planned, captured, {})
    casts = [(m.value, dtypes(n)) for n in graph.nodes if (m := origin(n)) is not None]
    once = [cast for cast in casts if cast[0] not in mutated]
    assert len(set(once)) == len(once)


LIST = """
unlisted: keep
allow: [matmul]
deny: [exp, softplus]
infer: [sqrt, log, tanh, add, mul]
clear: [relu, view, split, getitem, add_]
promote: [maximum, cat]
"""

# One list serves all models here.
pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")


@pytest.fixture
def rules(tmp_path: Path) -> autocastfx.OpList:
    return op_list(tmp_path, LIST)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(4, 4)


def test_an_infer_after_an_allow_stays_low_where_that_moves_fewer_bytes(
    rules: autocastfx.OpList, x: torch.Tensor
) -> None:
    """TensorFlow's rule casts before the log, for no allow op follows."""
    lines = rewritten(lambda x: (x @ x).log().relu().exp(), x, op_list=rules, dtype=torch.bfloat16)
    assert lines == text("""
        + args_0_bfloat16: bf16 = to(args_0)
          matmul: bf16 = matmul(args_0_bfloat16)
          log: bf16 = log(matmul)
          relu: bf16 = relu(log)
        + relu_float32: f32 = to(relu)
          exp: f32 = exp(relu_float32)
          return exp
    """)


def test_one_cast_is_made_where_a_value_is_smallest(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    """The sum is read by three products: it is cast once, after the addition, not its two operands before."""

    def shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.exp() + y.exp()
        return (total @ x) @ (total @ total)

    lines = rewritten(shared, x, x, op_list=rules)
    assert "+ add_float16: f16 = to(add)" in lines
    assert "exp_float16" not in lines


def test_a_residual_stream_reads_its_branches_without_casts(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    """float32 plus low is one kernel: the stream stays float32 and no branch is widened by a cast of its own."""

    def stream(w: torch.Tensor) -> torch.Tensor:
        x = w @ w
        for _ in range(2):
            x = x + x.exp() @ w
        return x.exp()

    assert rewritten(stream, x, op_list=rules, dtype=torch.bfloat16) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
          matmul: bf16 = matmul(args_0_bfloat16)
        + matmul_float32: f32 = to(matmul)
          exp: f32 = exp(matmul_float32)
        + exp_bfloat16: bf16 = to(exp)
          matmul_1: bf16 = matmul(exp_bfloat16, args_0_bfloat16)
          add: f32 = add(matmul_float32, matmul_1)
          exp_1: f32 = exp(add)
        + exp_1_bfloat16: bf16 = to(exp_1)
          matmul_2: bf16 = matmul(exp_1_bfloat16, args_0_bfloat16)
          add_1: f32 = add(add, matmul_2)
          exp_2: f32 = exp(add_1)
          return exp_2
    """)


def test_of_low_operands_that_float32_mixes_the_smallest_is_cast(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    """One widened operand makes the sum float32: 4 numbers are cast, not the 16 of the other one, nor of the sum."""

    def mixed(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((x @ x) + (v @ x)).exp()

    for function, smallest in ((mixed, "matmul_1"), (lambda x, v: ((v @ x) + (x @ x)).exp(), "matmul")):
        plan = decided(function, x, x[0], op_list=rules, dtype=torch.bfloat16).plan
        assert plan["add"].placement.run is Precision.FLOAT32
        assert [c.value for c in plan.casts if c.dtype == "float32"] == [smallest]


def test_a_deny_folds_between_low_neighbours(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(x @ x) @ x

    assert rewritten(between, x, op_list=rules, dtype=torch.bfloat16) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
          matmul: bf16 = matmul(args_0_bfloat16)
          softplus: bf16 = softplus(matmul)
          matmul_1: bf16 = matmul(softplus, args_0_bfloat16)
        + matmul_1_float32: f32 = to(matmul_1)
          return matmul_1_float32
    """)
    unfolded = rewritten(between, x, op_list=rules, dtype=torch.bfloat16, fold="none")
    assert "softplus: f32 = softplus(matmul_float32)" in unfolded


@pytest.mark.parametrize("end", [lambda y, x: y, lambda y, x: (y + x.exp()) @ x, lambda y, x: y.exp() @ x])
def test_a_deny_with_a_float32_neighbour_does_not_fold(end, rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        return end(torch.nn.functional.softplus(x @ x), x)

    plan = decided(ends, x, op_list=rules, dtype=torch.bfloat16).plan
    assert plan["softplus"].dtype == "float32"
    assert str(plan["softplus"].placement.because) == "deny"


def test_a_float32_value_joined_through_a_view_widens_the_result(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    """Else the gradient of a class token, summed over a batch, would pass through 16 bits and overflow."""

    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = torch.nn.Parameter(torch.rand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([self.token.view(1, 4), x @ x])
            return (joined + 1) @ x if self.training else (joined @ x).exp() + joined.exp()

    plan = decided(Joined(), x, op_list=rules, dtype="float16").plan
    assert plan["view"].placement.run is Precision.FLOAT32
    assert plan["cat"].placement.run is Precision.FLOAT32
    plan = decided(Joined(), x, op_list=rules, fold="kernel", dtype="float16").plan
    assert plan["view"].placement.run is Precision.FLOAT32
    assert plan["cat"].placement.run is Precision.LOW
    assert str(plan["cat"].placement.because) == "folded"
    plan = decided(Joined().eval(), x, op_list=rules, fold="kernel", dtype="float16").plan
    assert plan["cat"].placement.run is Precision.FLOAT32, "one of its readers is"


class Spread(torch.nn.Module):
    """A sum with something that is spread over its rows: a parameter or an input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        return ((x @ x) + (self.bias if row is None else row)) @ x


def test_a_bias_widens_nothing_that_products_alone_read(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = Spread()
    assert decided(model, x, op_list=rules, dtype="float16").plan["add"].placement.run is Precision.LOW
    assert decided(model, x, x[0], op_list=rules, dtype="float16").plan["add"].placement.run is Precision.FLOAT32
    model.bias = torch.nn.Parameter(torch.rand(4, 4))  # as large as the sum: a value
    assert decided(model, x, op_list=rules, dtype="float16").plan["add"].placement.run is Precision.FLOAT32


def test_what_is_computed_is_not_joined_in_16_bits(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    joined = Function(lambda x: torch.cat([x.sinh(), x @ x]) @ x)
    plan = decided(joined, x, op_list=rules, fold="kernel", dtype="float16").plan
    assert plan["cat"].placement.run is Precision.FLOAT32


def test_reasons(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        low = (x.tanh() @ x).tanh()
        return torch.maximum(low @ x, x.exp().sqrt())

    plan = decided(chain, x, op_list=rules, dtype="float16").plan
    because = {
        name: str(plan[name].placement.because) for name in ("tanh", "tanh_1", "sqrt", "matmul", "exp", "maximum")
    }
    assert because == {
        "tanh": "no allow op before it",
        "tanh_1": "fewest bytes moved",
        "sqrt": "after exp",
        "matmul": "allow",
        "exp": "deny",
        "maximum": "after exp",
    }


def test_the_plan_says_what_is_moved_and_what_the_simple_rule_would_have_moved(
    rules: autocastfx.OpList, x: torch.Tensor
) -> None:
    plan = decided(lambda x: (x @ x).log().relu().exp(), x, op_list=rules, dtype="float16").plan
    # 16 elements. Cast of the input 6; matmul 2+2+2, log 2+2, relu 2+2; cast 6; exp 4+4. The rule casts before the log:
    # log and relu then move 4+4 each.
    assert plan.traffic.moved == 16 * (6 + 6 + 4 + 4 + 6 + 8)
    assert plan.traffic.moved_simply == 16 * (6 + 6 + 8 + 8 + 6 + 8)
    assert autocastfx.Plan.from_json(plan.to_json()) == plan


def test_converting_twice_places_the_same(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    function = Function(lambda x: (x @ x).tanh().exp() @ x)
    first, second = (decided(function, x, op_list=rules, dtype="float16").plan for _ in range(2))
    assert first == second
