"""Which decision a node gets, and the rules that no list overrides."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.errors import BannedOpError, OpListError, UnmatchedRuleWarning
from autocastfx.plan.plan import Plan, Precision
from autocastfx.policy.kernel_facts import load_kernel_facts
from tests.decided import decided
from tests.helpers import Function, op_list, relative_error, unchecked

LOW = [torch.float16, torch.bfloat16]


def plan_of(function: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> Plan:
    options.setdefault("dtype", torch.float16)
    return decided(function, *inputs, **options).plan


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(8, 8)


def test_a_listed_op_has_the_place_of_its_rule_as_source(x: torch.Tensor) -> None:
    decision = plan_of(lambda x: x @ x, x)["matmul"].decision
    file, line, column = str(decision.source).split(":")
    shown = (Path(__file__).parents[4] / file).read_text().splitlines()[int(line) - 1]
    assert shown[int(column) - 1 :].startswith("matmul")
    assert "tensor cores" in decision.reason


def test_an_unlisted_op_is_kept_and_counted(x: torch.Tensor, tmp_path: Path) -> None:
    rules = op_list(tmp_path, "allow: [matmul]")
    plan = plan_of(lambda x: (x @ x).tanh() @ x, x, op_list=rules)
    assert str(plan["tanh"].decision.category) == "keep"
    assert plan["tanh"].dtype == "float32"
    assert plan.unlisted == {"tanh": 1}


def test_unlisted_can_be_denied_or_refused(x: torch.Tensor, tmp_path: Path) -> None:
    rules = op_list(tmp_path, "{allow: [matmul], unlisted: deny}")
    assert str(plan_of(lambda x: x.tanh() @ x, x, op_list=rules)["tanh"].decision.category) == "deny"
    rules = op_list(tmp_path, "{allow: [matmul], unlisted: error}")
    with pytest.raises(BannedOpError, match=r"node 'tanh' in module '\(root\)' is tanh, which unlisted bans"):
        plan_of(lambda x: x.tanh() @ x, x, op_list=rules)


def test_a_banned_op_is_refused_with_the_reason_and_the_place(x: torch.Tensor, tmp_path: Path) -> None:
    rules = op_list(tmp_path, "ban: [{reason: no kernel, ops: [tanh]}]")
    with pytest.raises(BannedOpError, match=r"test\.yaml:1:33 bans: no kernel\. Replace the op in the model"):
        plan_of(lambda x: x.tanh() @ x, x, op_list=["default", rules])


def test_a_module_class_decides_for_all_ops_inside(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GLU(), nn.Linear(8, 16))
    rules = op_list(tmp_path, "deny: [torch.nn.modules.activation.GLU]")
    amp_model = autocastfx.convert(
        model, (torch.rand(2, 16),), op_list=["default", rules], dtype="float16", check=False
    )
    assert amp_model.plan["glu"].dtype == "float32"
    assert str(amp_model.plan["glu"].decision.source).endswith("test.yaml:1:8")


@pytest.mark.parametrize("dtype", LOW)
def test_a_constant_beyond_the_range_is_float32(x: torch.Tensor, dtype: torch.dtype) -> None:
    plan = plan_of(lambda x: ((x @ x) * 3.4e38).clamp(max=1) @ x, x, dtype=dtype)
    assert plan["mul"].dtype == "float32"
    assert plan["mul"].decision.source == "forced:constant"
    name = str(dtype).removeprefix("torch.")
    assert plan["mul"].decision.reason == f"other=3.4e+38 is beyond {name}'s range"


def test_the_range_is_that_of_the_dtype(x: torch.Tensor) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x) * 70000.0) @ x

    assert plan_of(scaled, x)["mul"].dtype == "float32"
    assert plan_of(scaled, x, dtype=torch.bfloat16)["mul"].dtype == "bfloat16"


def test_the_largest_number_of_the_dtype_is_in_its_range(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: ((x @ x) * 65504.0 + (x @ x) * 65505.0) @ x, x)
    assert [plan[name].dtype for name in ("mul", "mul_1")] == ["float16", "float32"]


@unchecked
def test_infinity_is_no_constant_beyond_the_range(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: (x @ x).masked_fill(x > 0.5, float("-inf")) @ x, x)
    assert plan["masked_fill"].dtype == "float16"


def test_an_epsilon_that_underflows_is_float32(x: torch.Tensor) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (1.0 / ((x @ x) * 0 + 1e-12)) @ x

    plan = plan_of(scaled, x)
    assert plan["add"].decision.source == "forced:epsilon"
    assert plan["add"].decision.reason == "other=1e-12 is below float16's smallest normal value"
    assert autocastfx.convert(Function(lambda x: 1 / (x @ x * 0 + 1e-12)), (x,), dtype="float16")(x).isfinite().all()


def test_an_epsilon_inside_a_float32_kernel_is_no_reason() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8, eps=1e-12), nn.Conv1d(8, 8, 1))
    with pytest.warns(UserWarning, match="use dtype=torch.bfloat16"):
        plan = autocastfx.convert(model, (torch.rand(2, 8, 4),), dtype="float16").plan
    assert plan["batch_norm"].dtype == "float16"


def test_a_named_dtype_is_obeyed(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: (x @ x).mean(0, dtype=torch.float32).expand(8, 8) @ x, x)
    assert plan["mean"].decision.source == "forced:dtype"
    assert plan["mean"].dtype == "float32"


def test_arange_stays_float32(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: torch.arange(8.0) + x @ x, x)
    assert plan["arange"].dtype == "float32"


def test_a_float_island_stays_float32_and_does_not_spread(x: torch.Tensor) -> None:
    def island(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        z = y.float().mul(2).tanh()
        return (y.relu() @ x) + z @ x

    plan = plan_of(island, x)
    assert plan["to"].decision.source == "forced:user-cast"
    assert plan["mul"].dtype == plan["tanh"].dtype == "float32"
    assert plan["relu"].dtype == "float16"


def test_a_cast_to_the_dtype_of_another_value_follows_it(x: torch.Tensor) -> None:
    def follow(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return y.tanh().to(y.dtype) @ x

    plan = autocastfx.convert(Function(follow), x, dtype="float16", check=False).plan
    assert "to" not in [n.op for n in plan.nodes]
    assert plan["tanh"].dtype == "float16"


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, float("-inf")])
def test_masks_made_in_the_model_give_no_nan(x: torch.Tensor, dtype: torch.dtype, fill: float) -> None:
    def attend(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = torch.where(keep, 0.0, fill)
        scores = x @ x.transpose(0, 1) + mask
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], mask[None])[0] + (
            scores.softmax(-1) @ x
        )

    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    amp_model = autocastfx.convert(Function(attend), (x, keep), dtype=dtype)
    result = amp_model(x, keep)
    # Two averages of values below 1, each rounded on its way in, in its weights and on its way out.
    assert relative_error(result, attend(x, keep)) < 6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LOW)
def test_a_constant_mask_that_the_low_dtype_cannot_hold_saturates(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.full((8, 8), torch.finfo(torch.float32).min).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, self.bias)

    x = torch.rand(1, 8, 8)
    amp_model = autocastfx.convert(Net(), (x,), dtype=dtype)
    assert any(c.saturates for c in amp_model.plan.casts)
    assert relative_error(amp_model(x), Net()(x)) < 4 * torch.finfo(dtype).eps
    everything_masked = autocastfx.convert(Net(), (x,), dtype=dtype)
    everything_masked.bias.fill_(torch.finfo(torch.float32).min)
    assert everything_masked(x).isfinite().all()


LEAST = torch.finfo(torch.float32).min


def attend(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.where(keep, x @ x, LEAST).softmax(-1) @ x


def test_a_number_that_only_hides_scores_is_another_one_in_bfloat16() -> None:
    x, keep = torch.rand(8, 8), torch.ones(8, 8, dtype=torch.bool)
    found = plan_of(attend, x, keep, dtype=torch.bfloat16)["where"]
    assert found.placement.run is Precision.LOW
    words = "other=-3.40282e+38, which only hides scores, is -1.69477e+38 in bfloat16"
    assert found.decision.reason.endswith(f"; {words}")
    assert "base.yaml" in str(found.decision.source)


@pytest.mark.parametrize("bias", [0.0, 20.0])
def test_in_float16_it_stays_for_scores_may_be_as_low_as_any_number(bias: float) -> None:
    def function(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return ((-(x @ x)).masked_fill(~keep, -1e9) + bias * x.tanh()).softmax(-1)

    x, keep = torch.full((8, 8), 70.0), torch.ones(8, 8, dtype=torch.bool)
    keep[0], keep[1:, 0] = False, False
    amp_model = autocastfx.convert(Function(function), (x, keep), dtype=torch.float16)
    assert amp_model.plan["masked_fill"].decision.source == "forced:constant"
    assert relative_error(amp_model(x, keep), function(x, keep)) < 4 * torch.finfo(torch.float16).eps


def test_a_list_may_deny_it(tmp_path: Path) -> None:
    x, keep = torch.rand(8, 8), torch.ones(8, 8, dtype=torch.bool)
    denied = plan_of(attend, x, keep, dtype=torch.bfloat16, op_list=["default", op_list(tmp_path, "deny: [where]")])
    assert denied["where"].placement.run is Precision.FLOAT32
    assert str(denied["where"].decision.source).endswith("test.yaml:1:8")


@pytest.mark.parametrize("category", ["allow", "infer", "promote"])
def test_it_is_obeyed_in_any_category_that_may_run_low(category: str, tmp_path: Path) -> None:
    x, keep = torch.randn(8, 8), torch.ones(8, 8, dtype=torch.bool).tril()
    keep[2] = False
    rules = op_list(tmp_path, f"{category}: [where]")
    amp_model = autocastfx.convert(Function(attend), (x, keep), dtype=torch.bfloat16, op_list=["default", rules])
    assert amp_model.plan["where"].placement.run is Precision.LOW
    assert relative_error(amp_model(x, keep), attend(x, keep)) < 8 * torch.finfo(torch.bfloat16).eps


def test_a_preset_that_follows_torch_autocast_keeps_its_number() -> None:
    x, keep = torch.rand(8, 8), torch.ones(8, 8, dtype=torch.bool)
    amp_model = autocastfx.convert(
        Function(attend), (x, keep), dtype=torch.bfloat16, op_list="torch_autocast_cpu", check=False
    )
    assert "hides" not in amp_model.plan["where"].decision.reason
    assert f"{LEAST}" in amp_model.code


def test_what_a_call_brings_may_be_a_mask_and_keeps_the_fill_over_it_float32() -> None:
    """Narrowed, its numbers would be infinite, and a row without a key NaN."""

    def function(x: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        bias = torch.where(keep, mask * 1.0, LEAST)
        return torch.nn.functional.scaled_dot_product_attention(x @ x, x, x, bias)

    x, keep = torch.rand(1, 8, 8), torch.ones(1, 8, 8, dtype=torch.bool).tril()
    mask = torch.full((1, 8, 8), LEAST)
    amp_model = autocastfx.convert(Function(function), (x, mask, keep), dtype=torch.bfloat16)
    assert amp_model.plan["where"].decision.source == "forced:constant"
    assert relative_error(amp_model(x, mask, keep), function(x, mask, keep)) < 4 * torch.finfo(torch.bfloat16).eps


def test_fills_that_meet_other_values_beyond_the_range_stay_float32(x: torch.Tensor) -> None:
    keep = torch.ones(8, 8, dtype=torch.bool)

    def summed(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return ((x @ x).masked_fill(keep, LEAST) + torch.where(keep, x @ x, LEAST)).softmax(-1) @ x

    def over(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, (x @ x) * 1e9, LEAST).softmax(-1) @ x

    def beside(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return (torch.where(keep, x @ x, LEAST) + torch.full((8, 8), -1e9).tril()).softmax(-1) @ x

    sources = [n.decision.source for f in (summed, over, beside) for n in plan_of(f, x, keep).nodes if "where" in n.op]
    assert sources == ["forced:constant"] * 3
    assert plan_of(beside, x, keep)["add"].decision.source == "forced:wide"


def test_values_measured_beyond_the_range_stay_float32(x: torch.Tensor) -> None:
    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    given = {"dtype": "float16", "calibrate": [(x, keep)], "check": False}
    plan = autocastfx.convert(Function(attend), (x, keep), **given).plan
    assert plan["where"].decision.source == "forced:range"


def biased(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    bias = torch.where(keep, x @ x, LEAST)
    return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], bias[None])[0]


def after_deny(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.where(keep, (x @ x).exp(), LEAST).softmax(-1) @ x


@pytest.mark.parametrize("run", ["float32", "low"])
@pytest.mark.parametrize("function", [biased, after_deny])
def test_a_plan_may_ask_for_either_precision_of_a_fill(function: Callable[..., Any], run: str, tmp_path: Path) -> None:
    x, keep = torch.rand(8, 8), torch.ones(8, 8, dtype=torch.bool).tril()
    keep[2] = False
    plan = tmp_path / "plan.json"
    line = f'{{"name": "where", "op": "where", "placement": {{"run": "{run}", "store": "{run}"}}}}'
    plan.write_text(f'{{"nodes": [{line}]}}')
    amp_model = autocastfx.convert(Function(function), (x, keep), dtype=torch.bfloat16, plan=plan)
    assert str(amp_model.plan["where"].placement.run) == run
    usual = plan_of(function, x, keep, dtype=torch.bfloat16)["where"].placement.run
    assert str(usual) == ("low" if function is biased else "float32")
    saturates = any(cast.saturates for cast in amp_model.plan.casts)
    assert saturates == (run == "float32" and function is biased), "what it holds in float32 is beyond the range"
    assert relative_error(amp_model(x, keep), function(x, keep)) < 8 * torch.finfo(torch.bfloat16).eps


def test_a_missing_kernel_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    facts = replace(load_kernel_facts(), no_kernel={("cpu", "float16"): frozenset({"lstm"})})
    monkeypatch.setattr(sys.modules["autocastfx.options"], "load_kernel_facts", lambda: facts)
    x = torch.rand(2, 3, 8)
    low = autocastfx.convert(Net(), (x,), dtype=torch.bfloat16)
    high = autocastfx.convert(Net(), (x,), dtype=torch.float16)
    other = decided(Net(), x, dtype=torch.float16, device="cuda")
    assert low.plan["lstm"].dtype.startswith("bfloat16")
    assert other.plan["lstm"].dtype.startswith("float16")
    assert high.plan["lstm"].dtype.startswith("float32")
    assert high.plan["lstm"].decision.source == "forced:no-kernel"
    assert high.plan["lstm"].decision.reason == "cpu has no float16 kernel"
    assert high(x).dtype == low(x).dtype == torch.float32


# -- module paths, conditions, devices --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.act(self.fc(x)) * 2).softmax(-1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack_plan(tmp_path: Path, text: str, **options: Any) -> Plan:
    torch.manual_seed(0)
    rules = op_list(tmp_path, text)
    options.setdefault("dtype", torch.bfloat16)
    return autocastfx.convert(Stack().eval(), (torch.rand(2, 8),), op_list=["default", rules], **options).plan


def runs(plan: Plan) -> dict[str, str]:
    return {node.name: str(node.placement.run) for node in plan.nodes}


def test_module_rules(tmp_path: Path) -> None:
    usual = runs(stack_plan(tmp_path, "{}"))
    assert usual["linear_2"] == "low"
    assert usual["softmax"] == "float32"
    plan = stack_plan(
        tmp_path,
        """\
        modules:
          - {path: layers.0, category: low, reason: bounded}
          - path: 're:head|layers\\.1'
            category: float32
            ops: [linear, softmax]
            reason: the last layers decide
        """,
    )
    now = runs(plan)
    assert {name: now[name] for name in now if now[name] != usual[name]} == {
        "softmax": "low",
        "linear_1": "float32",
        "gelu_1": "float32",
        "mul_1": "float32",
        "linear_2": "float32",
    }
    decision = plan["softmax"].decision
    assert (str(decision.category), decision.reason) == ("allow", "bounded")
    assert str(decision.source) == f"{tmp_path / 'test.yaml'}:2:5"
    assert (str(plan["linear_2"].decision.category), str(plan["linear_2"].decision.source)[-4:]) == ("deny", ":3:5")


@unchecked
def test_a_forced_low_module_still_obeys_what_the_dtype_and_the_model_say(x: torch.Tensor, tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x @ x) * 3.4e38
        return y.float().exp() + x.softmax(-1, dtype=torch.float32) + (x + 1e-12) + x.exp()

    rules = op_list(tmp_path, "modules: [{path: '**', category: low}]")
    plan = plan_of(function, x, op_list=["default", rules])
    sources = {node.name: str(node.decision.source) for node in plan.nodes}
    place = f"{tmp_path / 'test.yaml'}:1:11"
    assert sources["mul"] == "forced:constant"
    assert sources["to"] == "forced:user-cast"
    assert sources["softmax"] == "forced:dtype"
    assert sources["add_1"] == "forced:epsilon"
    assert sources["exp"] == sources["exp_1"] == sources["matmul"] == place
    assert plan["exp"].dtype == plan["exp_1"].dtype == "float16"


def test_a_forced_low_module_has_no_kernels_that_the_device_lacks(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(load_kernel_facts(), no_kernel={("cpu", "float16"): frozenset({"exp"})})
    monkeypatch.setattr(sys.modules["autocastfx.options"], "load_kernel_facts", lambda: facts)
    rules = op_list(tmp_path, "modules: [{path: '**', category: low}]")
    plan = plan_of(lambda x: (x @ x).exp() @ x, x, op_list=["default", rules])
    assert plan["exp"].decision.source == "forced:no-kernel"


def test_conditions_and_devices(tmp_path: Path) -> None:
    text = """\
        deny:
          - gelu: {when: {approximate: none}, reason: erf}
          - linear: {devices: cuda, reason: why not}
        """
    with pytest.warns(UnmatchedRuleWarning) as none:  # a rule for a device speaks there alone
        plan = stack_plan(tmp_path, text.replace("none", "tanh"))
    assert [str(w.message).partition("test.yaml")[2] for w in none] == [
        ":2:5: no gelu of the model has approximate=tanh. Captured so far: eval mode alone."
    ]
    assert runs(plan)["linear"] == "low"
    plan = stack_plan(tmp_path, text)
    assert (plan["gelu"].decision.reason, str(plan["gelu"].decision.category)) == ("erf", "deny")
    assert plan["linear"].decision.reason != "why not"
    plan = stack_plan(tmp_path, text, device="cuda")
    assert plan["linear"].decision.reason == "why not"


def test_rules_that_match_nothing_are_warned_of_once_each_and_can_be_silenced(
    x: torch.Tensor, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rules = op_list(tmp_path, "{deny: [exp2, tanh], modules: [{path: haed, category: low}]}")
    warnings.simplefilter("always")
    convert = partial(autocastfx.convert, Function(lambda x: x.tanh() @ x), x, dtype="float16", check=False)
    convert(op_list=["default", rules])
    assert [(w.category, str(w.message).partition("test.yaml")[2], w.filename) for w in recwarn.list] == [
        (UnmatchedRuleWarning, ":1:9: no node of the model is 'exp2'.", __file__),
        (UnmatchedRuleWarning, ":1:32: no module of the model matches 'haed'.", __file__),
    ]
    recwarn.clear()
    warnings.simplefilter("ignore", UnmatchedRuleWarning)
    convert(op_list=["default", rules])
    convert(op_list="default")
    assert recwarn.list == []


def test_a_rule_is_looked_for_in_the_mode_that_is_captured(x: torch.Tensor, tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() if self.training else x.sin()

    rules = op_list(tmp_path, "deny: [sin, tanh]")
    amp_model = autocastfx.convert(Net(), (x,), op_list=["default", rules], dtype="float16", check=True)
    amp_model.eval()(x)
    assert [variant.plan.nodes[0].op for variant in amp_model.variants] == ["tanh", "sin"]


def test_rules_that_contradict_each_other_for_a_node_are_refused(tmp_path: Path) -> None:
    text = "modules: [{path: layers.*, category: low}, {path: '*.1', category: float32}]"
    with pytest.raises(OpListError, match=r"test\.yaml:1:11: .* at .*test\.yaml:1:44: both fit node 'linear_1'"):
        stack_plan(tmp_path, text)


def test_a_product_with_a_value_beyond_the_range_stays_float32() -> None:
    """Saturated it would be wrong; a bias that masks scores may saturate."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.full((8, 8), 1e5 + 0.5))
            self.register_buffer("mask", torch.full((1, 8, 8), -1e9))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x * 1e-3) @ self.table, torch.baddbmm(self.mask, x[None], x[None])

    x = torch.ones(8, 8)
    amp_model = autocastfx.convert(Scaled(), (x,), dtype=torch.float16)
    assert amp_model.plan["matmul"].decision.source == "forced:wide"
    assert amp_model.plan["baddbmm"].placement.run is Precision.LOW
    assert torch.equal(amp_model(x)[0], Scaled()(x)[0])


def test_statistics_beyond_the_range_do_not_concern_an_op_that_keeps_them_float32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    model[1].running_var.fill_(1e5)
    plan = decided(model, torch.rand(3, 8), dtype=torch.float16).plan
    assert plan["batch_norm"].placement.run is Precision.LOW


# -- squares, islands, numbers, whole numbers, distances --------------------------------------------------------------


def test_a_product_of_a_value_with_itself_is_a_square(x: torch.Tensor) -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return (y * y) @ x + (y * (y + 1)) @ x

    plan = plan_of(squares, x)
    assert plan["mul"].decision.reason.startswith("a mul of a value with itself is a square; squares and powers")
    assert str(plan["mul"].decision.category) == "deny"
    assert "float16.yaml" in str(plan["mul"].decision.source)
    assert str(plan["mul_1"].decision.category) == "infer"
    bfloat16 = plan_of(squares, x, dtype=torch.bfloat16)["mul"].decision
    rule = autocastfx.load_op_list("bfloat16").rule("square")
    assert rule is not None
    assert bfloat16.category is rule.category


def test_a_rule_for_modules_goes_before_what_a_square_or_a_product_is(x: torch.Tensor, tmp_path: Path) -> None:
    rules = op_list(tmp_path, "modules: [{path: '**', category: low}]")
    plan = plan_of(lambda x: (x * x) @ x, x[:2, :2], op_list=["default", rules])
    assert {n.dtype for n in plan.nodes if n.op in ("mul", "matmul")} == {"float16"}


def test_a_product_whose_operands_the_model_casts_to_float32_is_an_island(x: torch.Tensor) -> None:
    def island(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return y.float().mT @ y.float() + y.float() @ x

    plan = plan_of(island, x)
    assert plan["matmul_1"].decision.source == "forced:user-cast"
    assert plan["matmul_1"].decision.reason == "the model casts all its operands to float32"
    assert plan["matmul_2"].dtype == "float16", "one operand alone is cast"


@pytest.mark.parametrize("dtype", LOW)
def test_a_number_that_becomes_one_is_float32(x: torch.Tensor, dtype: torch.dtype) -> None:
    def bounded(x: torch.Tensor) -> torch.Tensor:
        y = (x @ x).sigmoid()
        return y.clamp(1e-3, 1 - 1e-7) @ x + (y * -0.99999) @ x + ((x @ x) * 0.75) @ x

    plan = plan_of(bounded, x, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    assert plan["clamp"].decision.source == plan["mul"].decision.source == "forced:epsilon"
    assert plan["clamp"].decision.reason == f"max=0.9999999 is rounded to 1 in {name}"
    assert plan["mul"].decision.reason == f"other=-0.99999 is rounded to -1 in {name}"
    assert plan["mul_1"].dtype == name


def test_a_number_next_to_one_counts_by_the_dtype(x: torch.Tensor) -> None:
    def decayed(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x) * 0.999) @ x

    runs = {dtype: plan_of(decayed, x, dtype=dtype)["mul"].dtype for dtype in LOW}
    assert runs == {torch.float16: "float16", torch.bfloat16: "float32"}


class Held(nn.Module):
    """An epsilon that a buffer, or a parameter, holds."""

    def __init__(self, number: float, trained: bool) -> None:
        super().__init__()
        held = torch.tensor(number)
        if trained:
            self.epsilon = nn.Parameter(held)
        else:
            self.register_buffer("epsilon", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return (y / (y.abs() + self.epsilon)) @ x


@pytest.mark.parametrize(
    ("number", "trained", "source"),
    [
        (1e-12, False, "forced:epsilon"),
        (1e6, False, "forced:constant"),
        (0.5, False, ""),
        (1e-12, True, ""),  # an optimizer changes it
    ],
)
def test_a_buffer_of_one_element_counts_as_its_number(
    x: torch.Tensor, number: float, trained: bool, source: str
) -> None:
    decision = decided(Held(number, trained), x, dtype=torch.float16).plan["add"].decision
    assert decision.source == source or not (source or str(decision.source).startswith("forced"))
    assert decision.reason.startswith("epsilon=") is bool(source)


def test_a_product_that_reads_or_gives_large_whole_numbers_is_float32(x: torch.Tensor) -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(1024, 1024).tril() @ torch.ones(1024, 2) + torch.arange(2048.0).view(-1, 2) @ x[:2, :2]

    low = plan_of(lambda x: torch.ones(8, 8).tril() @ torch.ones(8, 2), x, dtype=torch.bfloat16)["matmul"]
    assert low.dtype == "bfloat16"
    found = plan_of(counted, x, dtype=torch.bfloat16)
    assert found["matmul"].decision.source == "forced:whole"
    expected = "gives whole numbers up to 1,024; bfloat16 tells them apart up to 256"
    assert found["matmul"].decision.reason == expected
    assert found["matmul_1"].decision.reason == "reads view: " + expected[6:].replace("1,024", "2,048")


def test_positions_added_inside_a_product_keep_it_float32(x: torch.Tensor) -> None:
    def biased(x: torch.Tensor, step: float) -> torch.Tensor:
        bias = (torch.arange(512.0) * step).view(8, 8, 8)
        return torch.baddbmm(bias, x.expand(8, 8, 8), x.expand(8, 8, 8)).softmax(-1)

    decision = plan_of(lambda x: biased(x, 0.125), x, dtype=torch.bfloat16)["baddbmm"].decision
    assert (decision.source, decision.reason) == ("forced:whole", "adds positions: view")


def test_the_product_of_a_distance_is_float32(x: torch.Tensor) -> None:
    def distances(x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).sum(-1, keepdim=True) - 2 * (x @ x.mT) + x.pow(2).sum(-1)

    decision = plan_of(distances, x)["matmul"].decision
    assert decision.source == "forced:cancellation"
    assert decision.reason == "is taken from the squares of its own operands (pow_1): a small difference"


LENGTHS = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def hidden_by_product(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (1.0 - keep[:, None].float()) * -10000.0


def hidden_by_fill(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    inverted = 1.0 - keep[:, None].float()
    return inverted.masked_fill(inverted.bool(), LEAST)


def hidden_by_choice(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.where(keep[:, None] > 0, 0.0, -1e9)


def hidden_by_sum(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return hidden_by_product(x, keep) + torch.full((8, 8), -10000.0).triu(1)


@pytest.mark.parametrize("mask", [hidden_by_product, hidden_by_fill, hidden_by_choice, hidden_by_sum])
@pytest.mark.parametrize("dtype", LOW)
def test_a_mask_of_whole_numbers_holds_no_positions(mask: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask(x, keep))

    plan = plan_of(function, torch.rand(2, 8, 8), LENGTHS, dtype=dtype)
    assert plan["scaled_dot_product_attention"].placement.run is Precision.LOW


@pytest.mark.parametrize("hidden", [False, True])
def test_positions_are_some_though_a_number_hides_others(hidden: bool) -> None:
    def function(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        bias = (torch.arange(1024.0) - 1023) * 0.125
        bias = torch.where(keep[:1] > 0, bias.view(128, 8)[:8], -1e9) if hidden else bias.view(128, 8)[:8]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, bias)

    plan = plan_of(function, torch.rand(2, 8, 8), LENGTHS, dtype=torch.bfloat16)
    assert plan["scaled_dot_product_attention"].decision.source == "forced:whole"


def test_a_plan_may_ask_for_16_bits_on_an_island(x: torch.Tensor, tmp_path: Path) -> None:
    def island(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return y.float().mT @ y.float()

    plan = tmp_path / "plan.json"
    line = '{"name": "matmul_1", "op": "matmul", "placement": {"run": "low", "store": "low"}}'
    plan.write_text(f'{{"nodes": [{line}]}}')
    assert plan_of(island, x)["matmul_1"].dtype == "float32"
    assert plan_of(island, x, plan=plan)["matmul_1"].dtype == "float16"
