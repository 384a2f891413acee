"""Two graphs beside each other: what a run keeps for the way back."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from autocastfx import convert
from autocastfx.numerics.paired_run import run_side_by_side

X = torch.rand(2, 8)


def test_a_tape_is_kept_of_each_graph_that_is_at_hand_if_gradients_are_asked_for() -> None:
    amp_model = convert(nn.Linear(8, 8), (X,), dtype="float16")
    assert run_side_by_side(None, amp_model, (X,), {}).tapes == ()
    assert len(run_side_by_side(None, amp_model, (X,), {}, gradients=True).tapes) == 2
    loaded = pickle.loads(pickle.dumps(amp_model))  # which is captured again
    assert len(run_side_by_side(None, loaded, (X,), {}, gradients=True).tapes) == 2
    low = convert(nn.Linear(8, 8).eval(), (X,), dtype="float16", weights="low")
    assert len(run_side_by_side(None, low, (X,), {}, gradients=True).tapes) == 1
