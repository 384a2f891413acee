"""The judge of the corpus tells right from wrong, and what each case demands is met by a version written by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autocastfx import OpList
from autocastfx.passes.analysis.exact_numbers import WholeNumbers
from autocastfx.passes.analysis.value_ranges import Limit
from autocastfx.passes.decide import checks
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category
from benchmarks import corpus
from tests.helpers import sampled
from tests.numerics.corpus import CASES
from tests.numerics.corpus.case import Case, Demand
from tests.numerics.corpus.judge import (
    DTYPES,
    Judgement,
    Reference,
    Run,
    judge,
    judge_model,
    judge_ours,
    modes_of,
    refer,
)
from tests.numerics.corpus.parts import rows


class Plain(nn.Module):
    """A layer, with what is done to its result, to its gradient, and to a buffer."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        self.seen.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return {"y": self.change(y)}


PLAIN = Case("plain", Plain, rows(4), "judge", Demand(3), "linear 3")


def coarse(y: Tensor) -> Tensor:
    """Six significant bits."""
    return (y.detach() * 8).round() / 8 + (y - y.detach())


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.1


def fails(case: Case, change: Callable[[Tensor], Tensor]) -> str:
    """The tensor that is farthest off in a model with a fault."""
    reference = refer(case)
    model = case.model()
    assert isinstance(model, Plain)
    model.change = change
    found = judge_model(reference, model, torch.float16)
    assert not found.held
    return found.fault or found.worst


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_right_model_holds(dtype: torch.dtype) -> None:
    found = judge_model(refer(PLAIN), PLAIN.model(), dtype)
    assert found.held, (found.fault, found.worst)
    assert len(found.errors) == 4 * 3 + 2, "two modes, two sizes: output, buffer, input; and two gradients"


def test_planted_faults_are_found() -> None:
    assert "output" in fails(PLAIN, coarse)
    assert "gradient" in fails(PLAIN, WrongGradient.apply)
    assert "output" in fails(PLAIN, lambda y: y.where(y < y.amax(), math.nan))
    assert "structure" in fails(PLAIN, lambda y: (y, y))  # type: ignore[return-value]
    assert "gradient" in fails(PLAIN, lambda y: y.detach() + 0.0 * y.sum())
    assert "output" in fails(PLAIN, lambda y: y[:, :3])


def test_a_wrong_buffer_and_a_changed_input_are_found() -> None:
    reference = refer(PLAIN)
    run = reference.run
    for name in ("train 8: buffer seen", "eval 12: input 0", "train 8: gradient layer.bias"):
        planted = Run({**run.tensors, name: run.tensors[name] * 1.01}, run.others)
        found = judge(reference, planted, torch.float16, dtypes=False)
        assert not found.held
        assert found.worst == name


def test_a_dtype_is_judged_where_asked_for() -> None:
    reference = refer(PLAIN)
    exact = Run({name: tensor.to(reference.dtypes[name]) for name, tensor in reference.run.tensors.items()},
                reference.run.others)  # fmt: skip
    assert judge(reference, exact, torch.float16, dtypes=True).held
    wide = judge(reference, reference.run, torch.float16, dtypes=True)
    assert "torch.float64" in wide.fault


def test_a_small_wrong_gradient_is_not_lost_beside_a_large_one() -> None:
    reference = refer(next(case for case in CASES if case.name == "small-gradients"))
    assert judge(reference, reference.run, torch.float16, dtypes=False).held
    small, large = (f"train 8: gradient {name}.0.weight" for name in ("side", "main"))
    gradients = reference.run.tensors
    assert gradients[small].norm() < 1e-4 * gradients[large].norm()
    planted = Run({**gradients, small: gradients[small] * 1.05}, reference.run.others)
    assert judge(reference, planted, torch.float16, dtypes=False).worst == small
    assert not judge(reference, planted, torch.float16, dtypes=False).held


def test_each_call_starts_from_the_state_of_the_model() -> None:
    found = refer(PLAIN).run.tensors
    for mode in ("train", "eval"):
        for size in PLAIN.sizes:
            model, call = PLAIN.model().train(mode == "train"), PLAIN.call(size)
            model(*call.args)
            torch.testing.assert_close(found[f"{mode} {size}: buffer seen"].float(), model.get_buffer("seen"))


class Centred(nn.Module):
    """A bias whose gradient is zero in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def test_a_gradient_that_is_zero_is_held_against_the_others() -> None:
    reference = refer(Case("centred", Centred, rows(4), "judge", Demand(4), ""))
    name = "train 8: gradient layer.bias"
    assert reference.run.tensors[name].norm() < 1e-6
    largest = reference.run.tensors["train 8: gradient layer.weight"]
    for share, held in ((1e-3, True), (0.5, False)):
        planted = {**reference.run.tensors, name: largest[0] * share}
        assert judge(reference, Run(planted, reference.run.others), torch.float16, dtypes=False).held is held


def test_what_reads_its_mode_is_judged_in_both() -> None:
    assert modes_of(nn.Linear(4, 4)) == ("train",)
    assert modes_of(nn.Sequential(nn.Linear(4, 4), nn.Dropout())) == ("train", "eval")
    two = {case.name: len(modes_of(case.model())) for case in CASES if case.name in ("codebook", "rotary")}
    assert two == {"codebook": 2, "rotary": 1}


def test_a_case_that_float32_does_not_hold_is_refused() -> None:
    case = Case("ill", lambda: Plain(lambda y: (y * 1e9).sin()), rows(4), "judge", Demand(4), "")
    with pytest.raises(ValueError, match="float32 itself is off by"):
        refer(case)


@pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")
@pytest.mark.filterwarnings("ignore:.* are float64, and only float32 values are converted")
@pytest.mark.parametrize("number", sampled(range(len(CASES)), lambda number, _: number % 4 < 2))
def test_a_hand_written_version_and_the_conversion_hold(number: int) -> None:
    """A demand that a hand-written mixed precision version does not meet would be a wrong demand.

    Both are judged in one of the two dtypes, and in the modes that can differ; `python -m benchmarks.corpus` judges all
    in both.
    """
    case = CASES[number]
    reference = refer(case, modes_of(case.model()))
    name = list(DTYPES)[number % 2]
    _assert_held(judge_model(reference, case.with_islands(), DTYPES[name]), f"by hand in {name}")
    _assert_held(judge_ours(reference, DTYPES[name]), name)


def _assert_held(found: Judgement, which: str) -> None:
    worst = found.worst
    assert not found.fault, f"{which}: {found.fault}"
    assert found.held, f"{which}: {worst} is off by {found.errors[worst]:.2e}, allowed {found.bounds[worst]:.2e}"


def _switch_off(point: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Take one of the rules out of the package; gives the options of a conversion that does without it."""
    if point == "provenance":
        patch.setattr("autocastfx.passes.analysis.place_cheaply._widening", lambda *_, **__: iter(()))
    elif point == "parameters":
        patch.setattr(
            "autocastfx.passes.analysis.place_cheaply._narrowed_anyway",
            lambda units, *_, **__: {u for u in units if u.category is Category.INFER},
        )
    elif point == "shape":
        return {"op_list": ["default", OpList.of({"product_depth": None})]}
    elif point == "demand":
        lifted = sorted(load_op_list("default").demands)
        return {"op_list": ["default", OpList.of({"demands": [{"ops": lifted, "through": "nothing"}]})]}
    elif point == "whole numbers":
        patch.setattr(WholeNumbers, "of", lambda *_: WholeNumbers({}, frozenset()))
    elif point == "distances":
        patch.setattr(checks, "distance_products", lambda *_: {})
    elif point == "sums":
        return {"op_list": ["default", OpList.of({"promote": ["index_add", "scatter_add", "scatter_reduce"]})]}
    elif point == "small differences":
        patch.setattr(checks, "cancellations", lambda *_: {})
    elif point == "first values":
        patch.setattr("autocastfx.capture.masks._widens", lambda zeros, total: False)
    elif point == "squares":
        patch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.look != checks.Case.is_square))
    elif point == "islands":
        patch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.look != checks.Case.is_island))
    return {}


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")  # all demands are lifted
@pytest.mark.parametrize(
    ("point", "name"),
    [
        ("provenance", "euler-48"),
        ("parameters", "learned-positions"),
        ("shape", "camera-matrices"),
        ("demand", "odds"),
        ("whole numbers", "soft-argmax"),
        ("distances", "nearest-code"),
        ("sums", "segment-mean"),
        ("small differences", "ssim"),
        ("first values", "sum-from-zeros"),
        ("squares", "loudness"),
        ("islands", "float-operands"),
    ],
)
def test_without_its_rule_a_case_is_lost(point: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == name)
    reference = refer(case, modes_of(case.model()))
    dtype = torch.float16 if point == "squares" else torch.bfloat16
    assert judge_ours(reference, dtype).held
    options = _switch_off(point, monkeypatch)
    found = judge_ours(reference, dtype, **options)
    assert not found.held
    assert point == "sums" or not found.fault  # without its rule an accumulation mixes dtypes, which torch refuses


def test_a_small_parameter_is_not_narrowed_at_any_level(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = refer(next(case for case in CASES if case.name == "small-layer-scale"))
    assert all(judge_ours(reference, torch.float16, fold=fold).held for fold in ("none", "exact", "kernel"))
    monkeypatch.setattr(Limit, "loses", lambda self, found: False)
    assert not judge_ours(reference, torch.float16, fold="kernel").held


def test_a_model_that_cannot_be_converted_does_not_hold() -> None:
    found = judge_ours(refer(PLAIN), torch.float32)
    assert not found.held
    assert "ArgumentError" in found.fault


def test_cases_have_names_of_their_own_and_a_reason() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert [case.name for case in CASES if not case.why] == []


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    corpus.main(["--cases", "tied-weights,dtypes", "--dtypes", "bfloat16", "--fold", "none", "--json", str(path)])
    rows = [corpus.Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert {row.case for row in rows} == {case.name for case in CASES if case.point == "dtypes"} | {"tied-weights"}
    assert all(row.held["islands"] for row in rows)
    printed = capsys.readouterr().out
    assert all(row.case in printed for row in rows)
    assert "torch.autocast holds and ours does not: " in printed
    with pytest.raises(SystemExit):
        corpus.main(["--cases", "nothing"])


@pytest.mark.parametrize(("wrong", "draws"), [([], 1), ([0], 8), (range(64), 64)])
def test_a_ratio_above_its_limit_is_taken_over_more_draws(
    wrong: Sequence[int], draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unlucky draw does not count; an error that is there in all of them does."""

    def errs(reference: Reference, dtype: torch.dtype, **options: Any) -> Judgement:
        error = 9.0 if reference.case.draw in wrong else 1.0
        return Judgement("", {"output 0": error}, {"output 0": 10.0})

    monkeypatch.setattr(corpus, "judge_ours", errs)
    monkeypatch.setattr(corpus, "judge_model", lambda *_: Judgement("", {"output 0": 1.0}, {"output 0": 10.0}))
    (row,) = corpus.measure(PLAIN, ["float16"], "kernel")
    assert row.draws == draws
    assert (row.ratio > 2) is (draws == 64)
