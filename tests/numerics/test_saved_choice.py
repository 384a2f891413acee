"""Choosing how each value is kept for backward: fewer bytes within an error that is predicted and measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import AmpModule, Budget
from autocastfx.errors import SensitivityError
from autocastfx.numerics import saved_choice
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.saved_choice import SavedOption, SavedSearch, check_saved
from autocastfx.policy.saved import Keep
from tests.runtime.test_saved import Layers


def loss(output: Tensor, batch: Any) -> Tensor:
    return output


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, list[Tensor], AmpModule, TargetDistance]:
    torch.manual_seed(0)
    model, batches = Layers().train(), [torch.randn(4, 64, 32) for _ in range(3)]
    amp_model = autocastfx.convert(model, (batches[0],), dtype="bfloat16", check=False)
    return model, batches, amp_model, TargetDistance(model, batches[2:], loss, "gradient", None)


def search(case: Any) -> SavedSearch:
    _, batches, amp_model, judge = case
    return SavedSearch(amp_model, batches[:2], loss, None, judge, torch.bfloat16)


def test_the_more_error_the_fewer_bytes(case: Any) -> None:
    found = [search(case).result(ratio=ratio) for ratio in (1.0, 1.5, 4.0)]
    exact, some, more = found
    assert exact.entries == ({"keep": "recompute"},)
    assert exact.measured == exact.start == exact.predicted
    assert exact.before > 2 * exact.kept > 2 * some.kept > 2 * more.kept
    for one, ratio in ((some, 1.5), (more, 4.0)):
        assert one.measured <= ratio * one.start
        assert 1 / 1.5 <= one.measured / one.predicted <= 1.5
    assert "MB instead of" in str(some)


def test_the_model_is_as_it_was(case: Any) -> None:
    model, batches, amp_model, _ = case
    torch.manual_seed(3)
    before = torch.autograd.grad(amp_model(batches[0]), list(model.parameters()))
    state = torch.get_rng_state()
    search(case).result(ratio=1.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(3)
    after = torch.autograd.grad(amp_model(batches[0]), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_share_of_bytes(case: Any) -> None:
    found = search(case).result(share=0.4)
    assert found.kept <= 0.4 * found.before
    with pytest.raises(SensitivityError, match="no rules keep less than"):
        search(case).result(share=0.01)


def test_a_form_that_loses_all_is_not_chosen(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    form = saved_choice.FORMS[Keep.FLOAT8]
    wrong = form._replace(unpack=lambda dtype, parts: form.unpack(dtype, parts) * math.nan)
    monkeypatch.setitem(saved_choice.FORMS, Keep.FLOAT8, wrong)  # type: ignore[arg-type]
    assert all(entry["keep"] != "float8" for entry in search(case).result(ratio=4.0).entries)


def option(name: str, keep: Keep, spares: int, error: float) -> SavedOption:
    return SavedOption((name, "linear"), keep, spares, error)


def test_options_are_taken_by_the_bytes_spared_for_their_error() -> None:
    low, float8 = option("a", Keep.BFLOAT16, 10, 1.0), option("a", Keep.FLOAT8, 15, 4.0)
    other = option("b", Keep.FLOAT8, 30, 9.0)

    def taken(limit: float, most: float | None = None) -> set[SavedOption]:
        return set(saved_choice._within([other, float8, low], limit**2 - 1.0, None if most is None else 100 - most))

    assert taken(1.0) == set()
    assert taken(math.sqrt(2.0)) == {low}
    assert taken(math.sqrt(5.0)) == {float8}  # which takes the place of the other form
    assert taken(10.0) == {float8, other}
    assert taken(10.0, most=90) == {low}
    assert taken(10.0, most=100) == set()
    assert taken(10.0, most=1) == {float8, other}, "all that can be"


def test_inner_modules_have_their_own_rules() -> None:
    groups = {("", "add"): 0, ("a", "add"): 0, ("a.b", "add"): 0, ("a", "mul"): 0}
    chosen = [SavedOption(("a", "add"), Keep.BFLOAT16, 1, 0.0)]
    assert saved_choice._entries(groups, chosen) == (
        {"keep": "recompute"},
        {"keep": "recompute", "ops": ["add"]},
        {"keep": "low", "ops": ["add"], "path": "a"},
        {"keep": "recompute", "ops": ["add"], "path": "a.b"},
    )


def test_tune_chooses_it_too(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, batches = Layers(1).train(), [torch.randn(4, 64, 32) for _ in range(3)]
    tuned = autocastfx.tune(model, batches, loss, dtype="bfloat16", probes=2, saved=1.5)
    assert tuned.saved is not None
    assert tuned.gains
    assert "kept for backward: " in tuned.report()
    assert sum(one.kept for one in tuned.plan.saved) == tuned.saved.kept
    tuned.save(tmp_path / "tuned.yaml")
    again = autocastfx.convert(model, (batches[0],), dtype="bfloat16", op_list=tmp_path / "tuned.yaml", check=False)
    kept = sum(one.kept for one in again.plan.saved)
    assert kept == tuned.saved.kept < 0.6 * tuned.saved.before


@pytest.mark.parametrize(
    ("saved", "limit"),
    [
        (True, {"ratio": 1.1}),
        (1.5, {"ratio": 1.5}),
        (Budget(error=0.01), {"error": 0.01}),
        (Budget(bytes=0.5), {"share": 0.5}),
    ],
)
def test_limits(saved: Any, limit: dict[str, float]) -> None:
    assert check_saved(saved, "gradient") == limit


@pytest.mark.parametrize("saved", [0.5, "all", math.inf, math.nan])
def test_a_wrong_limit_is_one_error(saved: Any) -> None:
    with pytest.raises(ValueError, match="saved is True, a factor of the error from 1 on, or a Budget"):
        check_saved(saved, "gradient")
    with pytest.raises(ValueError, match="saved is for training"):
        check_saved(True, "output")
