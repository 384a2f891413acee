"""What lists deny of a 16-bit model runs in float32; all else stays as it is, to the bit."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList
from autocastfx.errors import BannedOpError, PlanError, VerifyError
from autocastfx.passes import pipeline
from autocastfx.passes.casts import CastStyle, insert_casts
from autocastfx.passes.widen import WidenedDtypes
from autocastfx.plan.plan import Cause, Placement, Precision, Why
from tests.decided import decided
from tests.helpers import heard, listing, text

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")  # the rules of all functions
LOW = [torch.float16, torch.bfloat16]
X = torch.linspace(-2, 2, 64).view(8, 8)
_RULES: dict[str, Any] = {"allow": ["linear", "matmul", "mm"], "infer": ["add", "mul", "tanh"], "clear": ["view", "t"]}


class Weighted(nn.Module):
    """A function of a parameter and of what it is called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.eye(8) + torch.linspace(-0.1, 0.1, 64).view(8, 8))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self.weight, *args)


def converted(
    function: Callable[..., Any], *inputs: Tensor, low: torch.dtype = torch.bfloat16, **options: Any
) -> autocastfx.AmpModule:
    data = {**_RULES, **options.pop("rules", {})}
    inputs = inputs or (X.to(low),)
    return autocastfx.convert(Weighted(function).to(low).eval(), inputs, op_list=OpList.of(data, name="l"), **options)


def raised(amp_model: autocastfx.AmpModule) -> set[str]:
    return {node.name for node in amp_model.plan.nodes if node.placement.run is Precision.FLOAT32}


# -- change and no change --------------------------------------------------------------------------------------------


def test_a_raised_node_reads_and_gives_float32_between_two_casts() -> None:
    amp_model = converted(lambda w, x: (x @ w).exp() @ w, rules={"deny": ["exp"]})
    assert listing(amp_model.graph) == text("""
          matmul: bf16 = matmul(args_0, weight)
        + matmul_float32: f32 = to(matmul)
          exp: f32 = exp(matmul_float32)
        + exp_bfloat16: bf16 = to(exp)
          matmul_1: bf16 = matmul(exp_bfloat16, weight)
          return matmul_1
    """)
    assert [(c.name, c.value, c.dtype) for c in amp_model.plan.casts] == [
        ("matmul_float32", "matmul", "float32"),
        ("exp_bfloat16", "exp", "bfloat16"),
    ]
    planned = amp_model.plan["exp"]
    assert (planned.captured, planned.dtype) == ("bfloat16", "float32")
    assert str(planned.decision) == "deny, no reason given (l:deny[0])"
    assert (planned.placement.run, planned.placement.because) == (Precision.FLOAT32, Cause(Why.DENY))
    assert amp_model.plan["matmul"].placement == Placement(Precision.LOW, Precision.LOW, Cause(Why.AS_CAPTURED))


@pytest.mark.parametrize("low", LOW)
def test_the_numbers_are_those_of_the_ops_written_with_casts(low: torch.dtype) -> None:
    amp_model = converted(lambda w, x: (x @ w).exp() @ w, rules={"deny": ["exp"]}, low=low)
    by_hand = Weighted(lambda w, x: (x @ w).float().exp().to(low) @ w).to(low)
    assert torch.equal(amp_model(X.to(low)), by_hand(X.to(low)))
    for model in (amp_model, by_hand):
        model(X.to(low)).sum().backward()
    assert amp_model.weight.grad is not None
    assert amp_model.weight.grad.dtype == low
    assert torch.equal(amp_model.weight.grad, by_hand.weight.grad)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("training", [False, True])
def test_without_a_rule_that_denies_it_is_the_model_to_the_bit(low: torch.dtype, training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Softmax(-1))
    model = model.to(low).train(training)
    plain = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, (X.to(low),), op_list=OpList.of({"allow": ["linear"], "infer": ["gelu"]}))
    results: list[Tensor] = []
    for one in (amp_model, plain):
        torch.manual_seed(1)
        results.append(one(X.to(low)))
        results[-1].square().sum().backward()
    assert torch.equal(*results)
    assert not amp_model.plan.casts
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_parameters_stay_the_models() -> None:
    model = Weighted(lambda w, x: (x @ w).exp()).bfloat16()
    amp_model = autocastfx.convert(model, (X.bfloat16(),))
    assert dict(amp_model.named_parameters())["weight"] is model.weight
    assert amp_model.state_dict().keys() == model.state_dict().keys()
    assert amp_model.weight.dtype == torch.bfloat16


# -- the model's own casts, and what a rule for a module means --------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.norm, self.head = Norm(), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(self.norm(x + x))


def modules(*paths: str, **more: Any) -> list[OpList | str]:
    rules = [{"path": path, "category": "float32", "reason": f"{path} is float32", **more} for path in paths]
    return ["default", OpList.of({"modules": rules}, name="mine")]


def test_casts_of_the_model_stay_and_take_a_raised_value_unrounded() -> None:
    torch.manual_seed(0)
    model, ids = Head().bfloat16().eval(), torch.arange(8)
    amp_model = autocastfx.convert(model, (ids,), op_list=["default", OpList.of({"deny": ["add"]})])
    plan = amp_model.plan
    assert plan["to"].decision.source == "forced:user-cast"
    assert plan["to"].placement.as_stored == ("self",)
    assert plan["to_1"].placement.run is Precision.CAPTURED
    assert [(c.value, c.dtype) for c in plan.casts] == [("embedding", "float32")]
    table, norm = model.table(ids).float(), model.norm

    def by_hand(x: Tensor) -> Tensor:
        return model.head(norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16())

    assert torch.equal(amp_model(ids), by_hand(table + table))


def test_a_rule_for_a_module_takes_back_its_casts_to_16_bits() -> None:
    """Else a norm that casts its result before the last product would be raised in name only."""
    torch.manual_seed(0)
    model, ids = Head().bfloat16().eval(), torch.arange(8)
    amp_model = autocastfx.convert(model, (ids,), op_list=modules("norm", "head"), keep_output_dtype=False)
    wide = copy.deepcopy(model).float()
    expected = wide.head(wide.norm(model.table(ids).add(model.table(ids)).float()))
    assert torch.equal(amp_model(ids), expected)
    assert amp_model.plan["to_1"].decision.reason == "norm is float32"
    assert not torch.equal(amp_model(ids), model(ids).float())


def test_a_rule_for_a_module_leaves_what_is_exact_in_16_bits() -> None:
    amp_model = autocastfx.convert(Head().bfloat16().eval(), (torch.arange(8),), op_list=modules("**"))
    assert "embedding" not in raised(amp_model)  # its table would be widened in each call
    assert {"add", "mul_1", "linear"} <= raised(amp_model)
    named = autocastfx.convert(Head().bfloat16().eval(), (torch.arange(8),), op_list=modules("**", ops=["embedding"]))
    assert raised(named) == {"embedding", "add"}  # whose only reader is a cast to float32
    everything = {"modules": [{"path": "re:.*", "category": "float32"}]}
    assert raised(converted(lambda w, x: x.t() @ w, rules=everything)) == {"matmul"}


def test_a_call_that_names_its_dtype_stays_and_takes_a_raised_value_unrounded() -> None:
    amp_model = converted(
        lambda w, x: (x @ w).exp().softmax(-1, dtype=torch.float32), rules={"deny": ["exp", "softmax"]}
    )
    assert [c.value for c in amp_model.plan.casts] == ["matmul"]
    assert amp_model.plan["softmax"].decision.source == "forced:dtype"
    y = (X.bfloat16() @ Weighted(lambda w: w).bfloat16().weight).float().exp()
    assert torch.equal(amp_model(X.bfloat16()), y.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_bits_are_reinterpreted_as_captured(dtype: torch.dtype) -> None:
    amp_model = converted(lambda w, x: (x @ w).exp().view(dtype) * 2, rules={"deny": ["exp"]})
    by_hand = Weighted(lambda w, x: (x @ w).float().exp().bfloat16().view(dtype) * 2).bfloat16()
    assert torch.equal(amp_model(X.bfloat16()), by_hand(X.bfloat16()))


def test_the_square_of_a_value_has_the_rule_of_square() -> None:
    model = Weighted(lambda w, x: (x @ w) * (x @ w) + x * x).bfloat16()
    amp_model = decided(model, X.bfloat16())
    assert amp_model.plan["mul_1"].placement.run is Precision.FLOAT32
    assert amp_model.plan["mul"].placement.run is Precision.LOW


# -- what stays ------------------------------------------------------------------------------------------------------


def test_memory_that_is_written_into_stays_and_is_widened_anew_for_each_reader() -> None:
    def write(w: Tensor, x: Tensor) -> Tensor:
        y = x.exp()
        rows = y.view(8, 8)
        before = rows.log()
        y.add_(1)
        return before + rows.log() @ w

    amp_model = converted(write, rules={"deny": ["exp", "log"]})
    assert amp_model.plan["exp"].decision.source == "forced:stays-low"
    assert "shares memory that is written into" in autocastfx.explain(amp_model, "exp")
    assert "what it does has no float32 form here" in autocastfx.explain(amp_model, "exp")
    by_hand = Weighted(lambda w, x: x.exp().float().log().bfloat16() + (x.exp() + 1).float().log().bfloat16() @ w)
    assert torch.equal(amp_model(X.bfloat16()), by_hand.bfloat16()(X.bfloat16()))


@pytest.mark.parametrize("whole", [False, True])
def test_a_type_as_is_a_copy_still(whole: bool) -> None:
    """In float32 it would give its operand itself, and a write into one of the two would be one into both."""

    def widen(w: Tensor, x: Tensor, wide: Tensor) -> Tensor:
        y = (x @ w).exp()
        return y.type_as(wide).mul_(3) + y.log()

    def narrow(w: Tensor, x: Tensor, wide: Tensor) -> Tensor:
        y = wide + 1
        z = y.type_as(x)
        y.mul_(3)
        return z.log() + y

    modules = {"modules": [{"path": "re:.*", "category": "float32"}]}
    rules = modules if whole else {"deny": ["exp", "log"]}
    for function in (widen, narrow):
        amp_model = converted(function, X.abs().bfloat16(), X.abs(), rules=rules)
        inputs = X.abs().bfloat16(), X.abs()
        tolerance = 4 * torch.finfo(torch.bfloat16).eps  # a factor of 3 is far beyond it
        expected = Weighted(function).bfloat16()(*inputs)
        torch.testing.assert_close(amp_model(*inputs), expected, rtol=tolerance, atol=tolerance)


def test_what_a_written_cast_may_share_memory_with_stays() -> None:
    def write(w: Tensor, x: Tensor) -> Tensor:
        y = (x @ w).exp()
        return y.float().mul_(3) + y.log()

    amp_model = converted(write, rules={"deny": ["exp", "log"]})
    by_hand = Weighted(lambda w, x: 3 * (e := (x @ w).exp()).float() + e.float().log().bfloat16())
    assert torch.equal(amp_model(X.bfloat16()), by_hand.bfloat16()(X.bfloat16()))


@pytest.fixture
def only_16_bits() -> Iterator[Any]:
    with torch.library._scoped_library("raising", "FRAGMENT") as library:
        library.define("only_16_bits(Tensor x) -> Tensor")

        def refuse(x: Tensor) -> Tensor:
            if x.dtype == torch.float32:
                raise TypeError("16 bits only")
            return x + 1

        library.impl("only_16_bits", refuse, "CompositeExplicitAutograd")
        torch.library.register_fake("raising::only_16_bits", refuse, lib=library)
        yield torch.ops.raising.only_16_bits.default


def test_an_op_that_refuses_float32_stays_and_says_why(only_16_bits: Any) -> None:
    amp_model = converted(lambda w, x: only_16_bits(x @ w), rules={"deny": ["raising::only_16_bits"]})
    decision = amp_model.plan["only_16_bits"].decision
    assert (decision.reason, decision.source) == ("it does not take float32: 16 bits only", "forced:stays-low")
    assert not amp_model.plan.casts


def test_torch_logs_nothing_of_a_kernel_that_refuses_float32() -> None:
    ends = torch.tensor([4, 8], dtype=torch.int32)
    with heard("torch._subclasses.fake_tensor") as lines:
        amp_model = converted(
            lambda w, x, ends: torch._grouped_mm(x, torch.stack([w, w]), offs=ends),
            *(X.bfloat16(), ends),
            rules={"deny": ["_grouped_mm"]},
        )
    assert amp_model.plan["_grouped_mm"].decision.reason.startswith("it does not take float32: Expected inputs of BF16")
    assert not lines


def test_regions_without_gradients_are_raised_inside() -> None:
    def guarded(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ w).exp() @ w
        return x @ scale

    amp_model = converted(guarded, rules={"deny": ["exp"]})
    (exp,) = [node for node in amp_model.plan.nodes if node.op == "exp"]
    assert exp.placement.run is Precision.FLOAT32
    by_hand = Weighted(lambda w, x: x @ ((x @ w).float().exp().bfloat16() @ w)).bfloat16()
    assert torch.equal(amp_model(X.bfloat16()), by_hand(X.bfloat16()))


def test_a_banned_op_is_refused() -> None:
    with pytest.raises(BannedOpError, match=r"node 'exp' in module '\(root\)' is exp, which l:ban"):
        converted(lambda w, x: (x @ w).exp(), rules={"ban": ["exp"]})


# -- verify, idempotence ----------------------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], Any]) -> None:
    *before, verify = pipeline.WIDEN_PIPELINE
    monkeypatch.setattr(
        pipeline, "WIDEN_PIPELINE", (*before, lambda policy: lambda state: damage(state) or state, verify)
    )


def _retype(state: Any) -> None:
    next(n for n in state.graph.nodes if n.name == "matmul_float32").update_arg(1, torch.float64)


def _drop(name: str) -> Callable[[Any], None]:
    def drop(state: Any) -> None:
        cast = next(n for n in state.graph.nodes if n.name == name)
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        state.graph.erase_node(cast)

    return drop


def _replan(state: Any) -> Any:
    exp = next(n for n in state.widened if n.name == "exp")
    return replace(state, widened={**state.widened, exp: (torch.bfloat16,)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_retype, r"node 'exp' \(exp\): argument 'self' \(matmul_float32\) is float64, planned float32"),
        (_drop("matmul_float32"), r"node 'exp' \(exp\): argument 'self' \(matmul\) is bfloat16, planned float32"),
        (_drop("exp_bfloat16"), r"node 'matmul_1' \(matmul\)"),
        (_drop("log_bfloat16"), r"output log is float32, planned bfloat16"),
        (_replan, r"node 'exp' \(exp\): gives float32, planned bfloat16"),
    ],
)
def test_verify_refuses_a_wrong_graph(
    damage: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, damage)
    with pytest.raises(VerifyError, match=message):
        converted(lambda w, x: ((x @ w).exp() @ w).log(), rules={"deny": ["exp", "log"]})


def test_the_pass_run_twice_changes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def again(state: Any) -> None:
        found.append(str(state.graph))
        planned = WidenedDtypes(state.placements, state.dtypes, state.widened, torch.bfloat16)
        insert_casts(state.graph, planned, CastStyle("rewrite", torch.bfloat16))
        found.append(str(state.graph))

    planted(monkeypatch, again)
    model, x = Head().bfloat16().eval(), torch.arange(8)
    autocastfx.convert(model, (x,), op_list=modules("norm", "head"))
    assert found[0] == found[1]
    assert "float32" in found[0]


# -- plans, reports, saving -------------------------------------------------------------------------------------------


def test_an_edited_plan_raises_and_takes_back() -> None:
    usual = converted(lambda w, x: ((x @ w).exp() @ w).tanh(), rules={"deny": ["exp"]})
    nodes = {node.name: node for node in usual.plan.nodes}

    def edited(**runs: Precision) -> autocastfx.AmpModule:
        changed = [
            replace(n, placement=replace(n.placement, run=run, store=run)) if (run := runs.get(n.name)) else n
            for n in usual.plan.nodes
        ]
        return converted(
            lambda w, x: ((x @ w).exp() @ w).tanh(),
            rules={"deny": ["exp"]},
            plan=replace(usual.plan, nodes=tuple(changed)),
        )

    assert edited().plan == usual.plan
    moved = edited(exp=Precision.LOW, tanh=Precision.FLOAT32)
    assert raised(moved) == {"tanh"}
    assert moved.plan["tanh"].placement.because == Cause(Why.EDITED)
    assert "nodes moved: 1 from low to float32" in str(autocastfx.diff(usual.plan, edited(tanh=Precision.FLOAT32).plan))
    assert nodes["exp"].placement.run is Precision.FLOAT32


@pytest.mark.parametrize("name", ["matmul", "exp"])
def test_an_edit_of_a_plan_moves_nothing_else(name: str) -> None:
    """Float32 would flow through the first tanh, too, and no longer through the second."""

    def flowing(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh().exp().tanh().log()

    rules = {"deny": ["exp", "log"]}
    usual = converted(flowing, rules=rules)
    assert raised(usual) == {"exp", "tanh_1", "log"}
    run = Precision.LOW if name in raised(usual) else Precision.FLOAT32
    moved = replace(usual.plan[name], placement=replace(usual.plan[name].placement, run=run, store=run))
    plan = replace(usual.plan, nodes=tuple(moved if n.name == name else n for n in usual.plan.nodes))
    assert raised(converted(flowing, rules=rules, plan=plan)) == raised(usual) ^ {name}


def test_a_plan_cannot_raise_what_cannot_be(only_16_bits: Any) -> None:
    usual = converted(lambda w, x: only_16_bits(x @ w))
    (line,) = [node for node in usual.plan.nodes if node.op == "raising::only_16_bits"]
    wide = replace(line.placement, run=Precision.FLOAT32, store=Precision.FLOAT32)
    plan = replace(usual.plan, nodes=(replace(line, placement=wide),))
    with pytest.raises(PlanError, match=r"'only_16_bits' .* cannot run float32 and be stored float32"):
        converted(lambda w, x: only_16_bits(x @ w), plan=plan)


def test_dump_explain_and_compare_tell_of_it() -> None:
    amp_model = converted(lambda w, x: (x @ w).exp() @ w, rules={"deny": [{"reason": "it is steep", "ops": ["exp"]}]})
    shown = autocastfx.dump(amp_model)
    assert "nodes: 2 low (bfloat16), 1 float32, 0 captured" in shown
    assert "it is steep (l:deny[0].ops[0])" in shown
    assert autocastfx.explain(amp_model, "exp").startswith("exp (exp) in module (root) runs in float32: its category")
    assert autocastfx.explain(amp_model, "matmul").startswith(
        "matmul (matmul) in module (root) runs in 16 bits: as the"
    )
    for format in ("json", "html", "dot", "graphml", "python"):
        assert "exp" in autocastfx.dump(amp_model, format=format)
    assert autocastfx.Plan.from_json(amp_model.plan.to_json()) == amp_model.plan
    found = {node.name: node for node in autocastfx.compare(None, amp_model, X.bfloat16()).nodes}
    assert found["matmul"].error == 0
    assert 0 < found["exp"].error < torch.finfo(torch.bfloat16).eps
    assert autocastfx.find_overflow(amp_model, X.bfloat16()) is None


def test_compare_with_the_model_in_float32_captures_that() -> None:
    torch.manual_seed(0)
    model, ids = Head().bfloat16().eval(), torch.arange(8)
    wide = copy.deepcopy(model).float()
    amp_model = autocastfx.convert(model, (ids,), op_list=modules("**"), keep_output_dtype=False)
    errors = {node.name: node.error for node in autocastfx.compare(wide, amp_model, ids).nodes}
    assert errors["linear"] <= torch.finfo(torch.float32).eps  # the embedding is exact, and all after it is float32


def test_it_pickles_and_copies() -> None:
    amp_model = converted(lambda w, x: (x @ w).exp() @ w, rules={"deny": ["exp"]})
    model = nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Softmax(-1)).half()
    other = autocastfx.convert(model, (X.half(),))
    for one, x in ((other, X.half()),):
        for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert torch.equal(again(x), one(x))
            assert again.plan == one.plan
            again.to("meta")
    assert torch.equal(copy.deepcopy(amp_model)(X.bfloat16()), amp_model(X.bfloat16()))


def test_a_category_that_a_plan_gives_decides_what_it_moves(tmp_path: Path) -> None:
    """The line asks for no precision of its own."""

    def function(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh() @ w

    usual = converted(function).plan
    assert not raised(converted(function))
    tmp_path.joinpath("plan.json").write_text(
        json.dumps({"nodes": [{"name": "tanh", "op": usual["tanh"].op, "decision": {"category": "deny"}}]}),
        encoding="utf-8",
    )
    assert raised(converted(function, plan=tmp_path / "plan.json")) == {"tanh"}
