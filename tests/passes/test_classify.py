"""Which decision a node gets, and the rules that no list overrides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.kernel_facts import load_kernel_facts
from autocastfx.plan import Plan
from tests.helpers import Function, op_list, relative_error

LOW = [torch.float16, torch.bfloat16]


def plan_of(function: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> Plan:
    options.setdefault("dtype", torch.float16)
    return autocastfx.convert(Function(function), inputs, **options).plan


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(4, 4)


def test_a_listed_op_has_the_place_of_its_rule_as_source(x: torch.Tensor) -> None:
    decision = plan_of(lambda x: x @ x, x)["matmul"].decision
    file, line, column = decision.source.split(":")
    shown = (Path(__file__).parents[2] / file).read_text().splitlines()[int(line) - 1]
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
    with pytest.raises(
        autocastfx.BannedOpError, match=r"node 'tanh' in module '\(root\)' is tanh, which unlisted bans"
    ):
        plan_of(lambda x: x.tanh() @ x, x, op_list=rules)


def test_a_banned_op_is_refused_with_the_reason_and_the_place(x: torch.Tensor, tmp_path: Path) -> None:
    rules = op_list(tmp_path, "ban: [{reason: no kernel, ops: [tanh]}]")
    with pytest.raises(
        autocastfx.BannedOpError, match=r"test\.yaml:1:33 bans: no kernel\. Replace the op in the model"
    ):
        plan_of(lambda x: x.tanh() @ x, x, op_list=["default", rules])


def test_a_module_class_decides_for_all_ops_inside(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GLU(), nn.Linear(2, 4))
    rules = op_list(tmp_path, "deny: [torch.nn.modules.activation.GLU]")
    amp_model = autocastfx.convert(model, (torch.rand(2, 4),), op_list=["default", rules])
    assert amp_model.plan["glu"].dtype == "float32"
    assert amp_model.plan["glu"].decision.source.endswith("test.yaml:1:8")


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


def test_infinity_is_no_constant_beyond_the_range(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: (x @ x).masked_fill(x > 0.5, float("-inf")) @ x, x)
    assert plan["masked_fill"].dtype == "float16"


def test_an_epsilon_that_underflows_is_float32(x: torch.Tensor) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (1.0 / ((x @ x) * 0 + 1e-12)) @ x

    plan = plan_of(scaled, x)
    assert plan["add"].decision.source == "forced:epsilon"
    assert plan["add"].decision.reason == "other=1e-12 is below float16's smallest normal value"
    assert autocastfx.convert(Function(lambda x: 1 / (x @ x * 0 + 1e-12)), (x,))(x).isfinite().all()


def test_an_epsilon_inside_a_float32_kernel_is_no_reason() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2, eps=1e-12), nn.Conv1d(2, 2, 1))
    with pytest.warns(UserWarning, match="use dtype=torch.bfloat16"):
        plan = autocastfx.convert(model, (torch.rand(2, 2, 4),)).plan
    assert plan["batch_norm"].dtype == "float16"


def test_a_named_dtype_is_obeyed(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: (x @ x).mean(0, dtype=torch.float32).expand(4, 4) @ x, x)
    assert plan["mean"].decision.source == "forced:dtype"
    assert plan["mean"].dtype == "float32"


def test_arange_stays_float32(x: torch.Tensor) -> None:
    plan = plan_of(lambda x: torch.arange(4.0) + x @ x, x)
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

    plan = plan_of(follow, x)
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

    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    amp_model = autocastfx.convert(Function(attend), (x, keep), dtype=dtype)
    result = amp_model(x, keep)
    # Two averages of values below 1, each rounded on its way in, in its weights and on its way out.
    assert relative_error(result, attend(x, keep)) < 6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LOW)
def test_a_constant_mask_that_the_low_dtype_cannot_hold_saturates(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, self.bias)

    x = torch.rand(1, 4, 4)
    amp_model = autocastfx.convert(Net(), (x,), dtype=dtype)
    assert any(c.saturates for c in amp_model.plan.casts)
    assert relative_error(amp_model(x), Net()(x)) < 4 * torch.finfo(dtype).eps
    everything_masked = autocastfx.convert(Net(), (x,), dtype=dtype)
    everything_masked.bias.fill_(torch.finfo(torch.float32).min)
    assert everything_masked(x).isfinite().all()


def test_a_missing_kernel_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    facts = replace(load_kernel_facts(), no_kernel={("cpu", "float16"): frozenset({"lstm"})})
    monkeypatch.setattr(sys.modules["autocastfx.convert"], "load_kernel_facts", lambda: facts)
    x = torch.rand(2, 3, 4)
    low = autocastfx.convert(Net(), (x,), dtype=torch.bfloat16)
    high = autocastfx.convert(Net(), (x,), dtype=torch.float16)
    other = autocastfx.convert(Net(), (x,), dtype=torch.float16, device="cuda")
    assert low.plan["lstm"].dtype.startswith("bfloat16")
    assert other.plan["lstm"].dtype.startswith("float16")
    assert high.plan["lstm"].dtype.startswith("float32")
    assert high.plan["lstm"].decision.source == "forced:no-kernel"
    assert high.plan["lstm"].decision.reason == "cpu has no float16 kernel"
    assert high(x).dtype == low(x).dtype == torch.float32
