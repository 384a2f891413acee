"""The edits that a page proposes: what they would save is what they save, and the page shows three of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.report.edits import Edit, best_edits
from tests.browser import browser, needs_browser

X = torch.randn(64, 8, 32)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)))


def converted(**options: Any) -> autocastfx.AmpModule:
    return autocastfx.convert(model(), X, dtype="bfloat16", check=False, **options)


def edits(amp_model: autocastfx.AmpModule) -> dict[str, Edit]:
    return {edit.write: edit for edit in best_edits(amp_model, amp_model.variants[0])}


def test_each_edit_saves_what_it_says() -> None:
    plain = converted()
    found = edits(plain)
    assert {'weights="cached"', 'fold="kernel"', "allow: [layer_norm]"} == found.keys()
    applied = {
        'weights="cached"': converted(weights="cached"),
        'fold="kernel"': converted(fold="kernel"),
        "allow: [layer_norm]": converted(op_list=["default", OpList.of({"allow": ["layer_norm"]})]),
    }
    for write, after in applied.items():
        assert found[write].before == plain.plan.traffic.moved
        assert found[write].after == after.plan.traffic.moved < found[write].before
    assert [edit.after for edit in found.values()] == sorted(edit.after for edit in found.values())


def test_nothing_is_proposed_that_is_done_or_changes_nothing() -> None:
    assert 'weights="cached"' not in edits(converted(weights="cached"))
    assert 'fold="kernel"' not in edits(converted(fold="kernel"))
    assert edits(converted(op_list="torch_autocast_cpu")) == {}
    assert edits(autocastfx.convert(nn.ReLU(), X, dtype="bfloat16", check=False)) == {}


def test_the_error_is_told_where_it_is_predicted() -> None:
    batches = [X, -X]
    measured = autocastfx.sensitivity(model(), batches, lambda y, _: y.square().mean(), dtype="bfloat16", probes=2)
    found = edits(converted(sensitivity=measured))['fold="kernel"']
    assert found.errors is not None
    assert f"; predicted error {found.errors[0]:.1e} → {found.errors[1]:.1e}" in found.effect


@needs_browser
@pytest.mark.parametrize("width", [1280, 2000])
def test_the_page_shows_three_at_once(width: int, tmp_path: Path) -> None:
    amp_model = converted()
    autocastfx.dump(amp_model, tmp_path / "model.html")
    with browser((width, 900)) as page:
        page.open(tmp_path / "model.html")
        bottom = page.run(
            "return [...document.querySelectorAll('#edits li')].map(e => e.getBoundingClientRect().bottom)"
        )
        assert len(bottom) == 3
        assert max(bottom) < page.run("return innerHeight")
        assert page.text("#edits code") == next(iter(edits(amp_model)))
        assert page.complaints() == []


@needs_browser
def test_on_a_phone_the_first_edit_is_in_sight_and_no_map_before_it(tmp_path: Path) -> None:
    autocastfx.dump(converted(), tmp_path / "model.html")
    with browser() as page:
        page.viewport(400, 900)
        page.open(tmp_path / "model.html")
        bottom = page.run("return document.querySelector('#edits li code').getBoundingClientRect().bottom")
        assert bottom < page.run("return innerHeight")
        assert page.run("return document.querySelector('#facts').getBoundingClientRect().width") > 300
        assert page.run("return getComputedStyle(document.querySelector('#map')).display") == "none"
