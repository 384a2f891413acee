"""Errors and shares of values against those of float32."""

from __future__ import annotations

import math

import pytest
import torch

from autocastfx.report import comparison
from autocastfx.report.comparison import Deviation
from tests.helpers import relative_error


def test_errors_and_shares() -> None:
    ours = torch.tensor([1.0, 0.0, math.inf, math.nan, 6e-8], dtype=torch.float16)
    theirs = torch.tensor([1.5, 1e-9, 1e6, 2.0, 6e-8])
    found = Deviation.of([ours], [theirs])
    assert found.dtype == "float16"
    assert found.error == pytest.approx(0.5 / 1.5, rel=1e-6)
    assert (found.overflow, found.underflow, found.zeros, found.nan) == (0.4, 0.4, 0.2, 0.2)
    assert found.severity == math.inf


def test_what_float32_has_as_well_is_no_deviation() -> None:
    both = torch.tensor([math.inf, math.nan, 0.0])
    found = Deviation.of([both.half()], [both])
    assert (found.error, found.overflow, found.underflow, found.zeros, found.nan) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert Deviation.of([torch.ones(2)], [torch.zeros(2)]).error == math.inf


def test_where_nothing_finite_is_left_the_error_is_infinite() -> None:
    theirs = torch.tensor([1.0, 2.0, math.inf])
    for ours in ([math.nan] * 3, [math.inf, -math.inf, math.inf], [math.nan, math.inf, 1.0]):
        assert Deviation.of([torch.tensor(ours).half()], [theirs]).error == math.inf
    assert Deviation.of([torch.tensor([math.nan, 2.0, math.nan]).half()], [theirs]).error == 0.0
    lost, kept = torch.tensor([math.nan]).half(), torch.ones(1).half()
    assert Deviation.of([lost, kept], [torch.ones(1), torch.ones(1)]).error == 0.0, "the second tensor has a number"


def test_a_mask_that_was_brought_into_range_is_no_error_and_all_else_is_one() -> None:
    theirs = torch.tensor([-1e9, 1e9, 2.0])
    assert Deviation.of([torch.tensor([-32752.0, 32752.0, 2.5]).half()], [theirs]).error == pytest.approx(0.25)
    assert Deviation.of([torch.tensor([-32752.0, -32752.0, 2.0]).half()], [theirs]).error > 0.9  # the sign is another
    assert Deviation.of([torch.tensor([-32752.0, 65504.0, 2.0]).half()], [theirs]).error > 0.9  # this is no mask's
    assert Deviation.of([torch.tensor([-32752.0, 1.0, 2.0]).half()], [theirs]).error > 0.9
    assert Deviation.of([torch.tensor([-32752.0, 32752.0, 2.0])], [theirs]).error > 0.9  # float32 has the range


def test_large_values_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    theirs = torch.randn(7, 5).t()
    ours = theirs.half()
    whole = Deviation.of([ours, ours], [theirs, theirs])
    monkeypatch.setattr(comparison, "_PIECE", 4)
    pieces = Deviation.of([ours, ours], [theirs, theirs])
    assert pieces.error == pytest.approx(whole.error, rel=1e-12)
    assert pieces.error == pytest.approx(relative_error(ours, theirs), rel=1e-6)
    assert Deviation.of([torch.ones(0)], [torch.ones(0)]).error == 0


def test_sparse_gradients_are_taken_whole() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert Deviation.of([dense.to_sparse()], [dense]).error == 0
