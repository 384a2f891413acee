"""Tuning keeps its budget on batches held out, says its plan as rules, and says when nothing is gained."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import autocastfx
from autocastfx.errors import GpuError, OpListError, SensitivityError, UnsupportedError
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.plan_search import Budget
from autocastfx.numerics.tune import Tuned
from autocastfx.plan.plan import Precision
from tests.helpers import Net


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return transformers.BertForMaskedLM(
            transformers.BertConfig(**sizes, **off, vocab_size=64)  # type: ignore[arg-type]
        ).train()


def tokens(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


BATCHES = [tokens(seed) for seed in range(3)]
FRESH = [tokens(seed) for seed in range(10, 12)]


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def tuned(request: pytest.FixtureRequest) -> tuple[nn.Module, Tuned]:
    model = bert()
    return model, autocastfx.tune(model, BATCHES, dtype=request.param, progress=False)


def test_the_default_budget_is_kept_with_fewer_bytes(tuned: tuple[nn.Module, Tuned]) -> None:
    model, found = tuned
    assert found.gains
    assert found.point.bytes < found.start.bytes
    assert found.point.measured is not None
    assert found.start.measured is not None
    assert found.point.measured <= found.start.measured
    assert found.budget.error == found.start.measured
    judge, low = TargetDistance(model, BATCHES[-1:], None, "gradient", None), getattr(torch, found.plan.low)
    again = found.convert(model, (), BATCHES[0])
    assert judge(again, low) == pytest.approx(found.point.measured, rel=1e-3)


def test_the_list_alone_gives_the_plan(tuned: tuple[nn.Module, Tuned], tmp_path: Path) -> None:
    model, found = tuned
    found.save(tmp_path / "tuned.yaml")
    saved = autocastfx.load_op_list(tmp_path / "tuned.yaml")
    assert saved == found.op_list
    assert (tmp_path / "tuned.yaml").read_text().startswith(f"extends: {found.plan.low}\n")
    for op_list in (found.op_list, tmp_path / "tuned.yaml"):
        amp_model = autocastfx.convert(model, (), BATCHES[0], dtype=found.plan.low, op_list=op_list)
        runs = {n.name: n.placement.run for n in amp_model.plan.nodes}
        assert runs == {n.name: n.placement.run for n in found.plan.nodes}
        assert amp_model.plan.casts == found.plan.casts != ()
    assert all(rule.reason.startswith("tuned") for rule in found.rules.modules)


def test_the_front_is_in_the_order_of_bytes(tuned: tuple[nn.Module, Tuned]) -> None:
    _, found = tuned
    assert [p.bytes for p in found.front] == sorted(p.bytes for p in found.front)
    assert {p.name for p in found.front} == {"start", "cut", "tuned"}
    assert 2 <= sum(p.measured is not None for p in found.front) <= 6
    assert len({p for p in found.front if p.name == "cut"}) <= 20
    errors = [p.predicted for p in found.front]
    assert max(errors) > 10 * min(errors)
    report = found.report()
    assert f"budget: an error of {found.budget.error:.2e}" in report
    assert "extends:" in report


def test_a_result_is_printed_as_its_report_and_shown_in_a_line(tuned: tuple[nn.Module, Tuned]) -> None:
    _, found = tuned
    assert str(found) == found.report()
    assert repr(found) == f"Tuned({found.point}; {found.budget})"
    assert len(repr(found)) < 300


def test_the_report_tells_a_bias(tuned: tuple[nn.Module, Tuned]) -> None:
    _, found = tuned
    measured = found.sensitivity
    assert measured.batches == 2
    first, *rest = (replace(node, effect=()) for node in found.plan.nodes)
    for effect, says in (
        ((2e-3,) * 16, "bias:   2.0e-03 of the predicted error is the same in all batches"),
        ((*(2e-3,) * 8, *(-2e-3,) * 8), "bias:   none of the predicted error seems the same in all batches"),
    ):
        plan = replace(found.plan, nodes=(replace(first, effect=effect), *rest))
        assert says in replace(found, plan=plan).report()
        assert "bias:" not in replace(found, plan=plan, sensitivity=replace(measured, batches=1)).report()
    assert "bias:" not in replace(found, plan=replace(found.plan, nodes=(first, *rest))).report()


def test_at_no_more_bytes_the_error_is_less(tuned: tuple[nn.Module, Tuned]) -> None:
    model, found = tuned
    nearer = autocastfx.tune(
        model,
        BATCHES,
        budget=Budget(bytes=1.0),
        dtype=found.plan.low,
        sensitivity=found.sensitivity,
        progress=False,
    )
    assert nearer.point.bytes <= nearer.start.bytes
    judge, low = TargetDistance(model, FRESH, None, "gradient", None), getattr(torch, found.plan.low)
    options: dict[str, Any] = {"dtype": found.plan.low}
    default = autocastfx.convert(model, (), BATCHES[0], **options)
    assert judge(nearer.convert(model, (), BATCHES[0]), low) < 0.75 * judge(default, low)


def test_another_list_is_a_budget(tuned: tuple[nn.Module, Tuned]) -> None:
    model, before = tuned
    options: dict[str, Any] = {"dtype": before.plan.low, "sensitivity": before.sensitivity, "progress": False}
    found = autocastfx.tune(model, BATCHES, budget="conservative", **options)
    amp_model = autocastfx.convert(model, (), BATCHES[0], dtype=before.plan.low, op_list="conservative")
    low = getattr(torch, before.plan.low)
    expected = TargetDistance(model, BATCHES[-1:], None, "gradient", None)(amp_model, low)
    assert found.budget.error == pytest.approx(expected, rel=1e-3)
    assert found.point.measured is not None
    assert found.point.measured <= found.budget.error


def test_a_persons_rules_stay() -> None:
    rules = autocastfx.OpList.of({"modules": [{"path": "bert.encoder.layer.0.attention", "category": "float32"}]})
    found = autocastfx.tune(bert(), BATCHES, dtype="bfloat16", op_list=("default", rules), progress=False)
    inside = [
        n for n in found.plan.nodes if n.module.startswith("bert.encoder.layer.0.attention") and n.op != "getitem"
    ]
    assert {n.placement.run for n in inside} <= {Precision.FLOAT32, Precision.CAPTURED}
    assert any(n.placement.run is Precision.LOW for n in found.plan.nodes)


def cancelling() -> nn.Module:
    """Adds 1000 and takes it away again: digits that 16 bits do not have."""
    return Net(
        lambda m, x: m.last(torch.relu(torch.tanh(m.first(x)) + 1000 - 1000)),
        first=nn.Linear(64, 64),
        last=nn.Linear(64, 4),
    )


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(512, 64, generator=generator), torch.randint(4, (512,), generator=generator)


OPTIONS: dict[str, Any] = {
    "loss_fn": lambda output, batch: F.cross_entropy(output, batch[1]),
    "inputs": lambda batch: batch[0],
    "dtype": "bfloat16",
    "progress": False,
}


def test_a_planted_fault_is_found_and_made_float32() -> None:
    batches = [rows(seed) for seed in range(3)]
    found = autocastfx.tune(cancelling(), batches, budget=Budget(error=0.05), **OPTIONS)
    assert found.start.measured is not None
    assert found.start.measured > 0.3
    runs = {n.op: n.placement.run for n in found.plan.nodes}
    assert runs["add"] is runs["sub"] is Precision.FLOAT32
    assert any(rule.wanted == "float32" and {"add", "sub"} <= set(rule.ops) for rule in found.rules.modules)


def test_a_budget_far_below_a_start_of_large_error_is_reached() -> None:
    batches = [rows(seed) for seed in range(3)]
    found = autocastfx.tune(cancelling(), batches, budget=Budget(error=1e-4), **OPTIONS)
    assert found.start.measured is not None
    assert found.start.measured > 0.3
    assert found.point.error <= 1e-4


def test_nothing_to_gain_is_said() -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))  # all is low already
    found = autocastfx.tune(model, [rows(seed) for seed in range(3)], **OPTIONS)
    assert not found.gains
    assert "nothing to gain" in found.report()


def test_of_the_output() -> None:
    found = autocastfx.tune(bert(), BATCHES, of="output", dtype="bfloat16", progress=False)
    assert found.sensitivity.of == "output"
    assert found.point.bytes <= found.start.bytes


def test_an_impossible_budget_is_an_error() -> None:
    with pytest.raises(SensitivityError, match=r"no plan keeps the budget \(0\.00 MB\)"):
        autocastfx.tune(bert(), BATCHES, budget=Budget(bytes=1e-6), dtype="bfloat16", progress=False)


def test_a_list_that_follows_torch_autocast_is_a_budget_and_no_start() -> None:
    model = bert()
    options: dict[str, Any] = {"dtype": "bfloat16", "progress": False}
    with pytest.raises(UnsupportedError, match=r"follows torch\.autocast's dispatch"):
        autocastfx.tune(model, BATCHES, op_list="torch_autocast_cuda", **options)
    found = autocastfx.sensitivity(model, BATCHES[:1], dtype="bfloat16", progress=False)
    with pytest.raises(UnsupportedError, match=r"follows torch\.autocast's dispatch"):
        autocastfx.convert(model, (), BATCHES[0], dtype="bfloat16", op_list="torch_autocast_cuda", sensitivity=found)
    tuned = autocastfx.tune(model, BATCHES, budget="torch_autocast_cuda", sensitivity=found, **options)
    assert tuned.budget.error is not None
    assert tuned.point.error <= tuned.budget.error


def test_tensorflows_list_can_be_started_from() -> None:
    found = autocastfx.tune(bert(), BATCHES, op_list="tensorflow", dtype="bfloat16", progress=False)
    assert len({point.bytes for point in found.front if point.name == "cut"}) > 2
    assert found.point.bytes <= found.start.bytes


def test_a_wrong_budget_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*arguments: Any) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr("autocastfx.numerics.sensitivity.Measuring.add", measured)
    with pytest.raises(OpListError, match="no_such_list"):
        autocastfx.tune(bert(), BATCHES, budget="no_such_list", dtype="bfloat16", progress=False)
    with pytest.raises(GpuError, match="no GPU is known as 'A1000'"):
        autocastfx.tune(bert(), BATCHES, gpu="A1000", dtype="bfloat16", progress=False)


def test_a_start_without_error_has_nothing_to_gain() -> None:
    found = autocastfx.tune(bert(), BATCHES, op_list="float32", dtype="bfloat16", progress=False)
    assert found.point.measured == 0.0
    assert not found.gains


def test_a_list_that_overflows_is_no_budget() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) * 300
            return self.last(hidden * (hidden + 1) * 1e-4)

    options = {**OPTIONS, "dtype": "float16"}
    with pytest.raises(SensitivityError, match=r"the budget 'default' has no end.*Give a Budget"):
        autocastfx.tune(Large(), [rows(seed) for seed in range(2)], **options)


def test_what_predictions_leave_out_is_told() -> None:
    class Doubled(nn.Module):
        """Writes into a part of a value, which is read whole later."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) * 3
            hidden[:, :32].mul_(2)
            return self.last(hidden)

    def network() -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return Doubled()

    found = autocastfx.tune(network(), [rows(seed) for seed in range(3)], **OPTIONS)
    left_out = found.plan.low_unmeasured
    assert left_out > 0
    assert f"predictions leave out {left_out} nodes in 16 bits" in found.report()
    amp_model = found.convert(network(), rows(0)[0])
    said = f"without {left_out} nodes in bfloat16 that were not measured"
    assert said in str(amp_model.plan)
    assert said in autocastfx.dump(amp_model)


def test_predictions_that_do_not_hold_are_told() -> None:
    class Masked(nn.Module):
        """A ReLU by a comparison, which no derivative and no fact about an op shows."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.last = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(x)
                x = torch.where(hidden > 0, hidden, 0)
            return self.last(x)

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Masked()
    found = autocastfx.tune(model, [rows(seed) for seed in range(3)], **OPTIONS)
    assert "predictions are doubtful for this model" in found.report()


def test_too_few_batches_are_an_error() -> None:
    with pytest.raises(SensitivityError, match="there are 1 batches, of which 1 are held out"):
        autocastfx.tune(bert(), BATCHES[:1], dtype="bfloat16")


def test_a_sensitivity_of_another_kind_is_refused() -> None:
    model = bert()
    found = autocastfx.sensitivity(model, BATCHES[:1], dtype="bfloat16", of="output", progress=False)
    with pytest.raises(SensitivityError, match="of the output to bfloat16, and this tunes the gradient in bfloat16"):
        autocastfx.tune(model, BATCHES, dtype="bfloat16", sensitivity=found)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"of": "loss"}, "of is one of 'gradient', 'output', not 'loss'"), ({"probes": 0}, "probes is a count")],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        autocastfx.tune(bert(), BATCHES, dtype="bfloat16", **options)


@pytest.mark.parametrize("given", [{}, {"error": 1.0, "bytes": 1.0}, {"error": 0.0}, {"bytes": -1.0}])
def test_a_budget_is_one_number_above_0(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a budget is an error or a share of bytes, above 0"):
        Budget(**given)


def residual() -> nn.Module:
    return Net(
        lambda m, x: x + m.down(F.gelu(m.up(m.norm(x)))),
        norm=nn.LayerNorm(32),
        up=nn.Linear(32, 64),
        down=nn.Linear(64, 32),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("budget", [Budget(bytes=1.0), Budget(error=1e-4)], ids=str)
def test_a_16_bit_model_is_tuned_by_its_float32_copy(dtype: torch.dtype, budget: Budget) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), residual(), residual(), nn.LayerNorm(32), nn.Linear(32, 4))
    low_model = nn.Sequential(*layers).to(dtype).eval()
    wide = copy.deepcopy(low_model).float()
    x = torch.randn(5, 256, 16).to(dtype)
    found = autocastfx.tune(wide, [(one.float(),) for one in x[:3]], budget=budget, of="output", dtype=dtype)
    assert found.gains
    amp_model = autocastfx.convert(low_model, (x[0],), op_list=found.op_list)

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            expected = wide(x[3:].float())
            return float((model(x[3:]).float() - expected).norm() / expected.norm())

    assert error(amp_model) < 0.95 * min(error(low_model), error(autocastfx.convert(low_model, (x[0],))))
    assert {p.dtype for p in amp_model.parameters()} == {dtype}
