"""What a capture patches is patched for its thread, for as long as it lasts; and captures take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx import _symbolic_trace

import autocastfx
from autocastfx.capture.leave_intact import CAPTURING, patched_here
from autocastfx.errors import CaptureError
from autocastfx.runtime import captures
from autocastfx.runtime.around import Around, is_inside
from tests.capture.test_call import Scaled
from tests.helpers import Straight
from tests.invariants.pair import settings_now


def in_threads(*runs: Callable[[], Any]) -> list[Any]:
    """What each gives, or raises, where all begin at once."""
    found: list[Any] = [None] * len(runs)
    barrier = threading.Barrier(len(runs))

    def run(i: int) -> None:
        barrier.wait()
        try:
            found[i] = runs[i]()
        except Exception as error:  # what a thread raises is looked at by the test
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Model(nn.Module):
    """With a custom function, whose calls a capture sees by a patch."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(8, 8), nn.Linear(8, 8), fails

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        y = self.b(Straight.apply(self.a(x) * 10)) * by
        if self.fails:
            raise KeyError("on purpose")
        return y


def test_conversions_in_several_threads_take_turns() -> None:
    x, now = torch.randn(3, 8), settings_now()

    def converted(number: int) -> bool:
        right = True
        for i in range(3):
            model = Model(fails=(number + i) % 4 == 3)
            inputs = (x,) if i else None
            try:
                amp_model = autocastfx.convert(model, inputs, dtype=torch.bfloat16)
                found = amp_model(x)
            except CaptureError:
                right = right and model.fails
                continue
            reference = autocastfx.convert(Model(), (x,), dtype=torch.bfloat16)
            reference.load_state_dict(amp_model.state_dict())
            right = right and not model.fails and torch.equal(found, reference(x))
            right = right and any("Straight" in node.op for node in amp_model.plan.nodes)
        return right

    assert in_threads(*(lambda n=n: converted(n) for n in range(4))) == [True] * 4
    assert settings_now()[1:] == now[1:]  # but for the random numbers that new models take


@pytest.mark.parametrize("same", [True, False], ids=["one call", "several calls"])
def test_new_variants_in_several_threads(same: bool) -> None:
    model, x = Model().eval(), torch.randn(3, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    count, now = len(amp_model.variants), settings_now()
    factors = [2.0] * 4 if same else [2.0, 3.0, 4.0, 5.0]
    found = in_threads(*(lambda by=by: amp_model(x, by) for by in factors))
    assert settings_now() == now
    assert len(amp_model.variants) <= count + len(factors)
    for by, result in zip(factors, found, strict=True):
        assert torch.equal(result, autocastfx.convert(model, (x, by), dtype=torch.bfloat16)(x, by))


def test_a_first_call_in_several_threads() -> None:
    amp_model = autocastfx.convert(Scaled().eval(), dtype=torch.bfloat16)
    x = torch.randn(3)
    assert all(torch.equal(found, x * 2.5) for found in in_threads(*[lambda: amp_model(x)] * 4))
    assert len(amp_model.variants) <= 4


def test_a_call_is_not_inside_of_what_another_thread_captures() -> None:
    """Flags of the process say that something is traced. A call that left and restored them would set them for ever."""
    tracing, ends = threading.Event(), threading.Event()
    around = Around(nn.Linear(2, 2), None)

    def capture() -> None:
        with CAPTURING, mock.patch.object(_symbolic_trace, "_is_fx_tracing_flag", True):
            tracing.set()
            ends.wait(60)

    thread = threading.Thread(target=capture)
    thread.start()
    assert tracing.wait(60)
    was_inside = is_inside()
    around._leave()
    ends.set()
    thread.join()
    around._left.close()
    assert not was_inside
    assert not _symbolic_trace._is_fx_tracing_flag
    with mock.patch.object(_symbolic_trace, "_is_fx_tracing_flag", True):
        assert is_inside()
        around._leave()
        assert not _symbolic_trace._is_fx_tracing_flag
        around._left.close()
        assert _symbolic_trace._is_fx_tracing_flag


def test_modules_that_other_threads_call_meanwhile_are_no_part_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    other, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(3, 8)
    results: list[Any] = []
    graph_of = captures.captured_graph

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        results.extend(in_threads(lambda: other(x)))
        return graph_of(*args, **kwargs)

    monkeypatch.setattr(captures, "captured_graph", meanwhile)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    assert results
    for found in results:
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, other(x))
    assert [node.module for node in amp_model.plan.nodes] == ["0", "1"]


class Owner:
    @classmethod
    def of(cls) -> str:
        return f"old {cls.__name__}"

    @staticmethod
    def plain() -> str:
        return "old"

    def method(self) -> str:
        return "old method"


class Heir(Owner):
    pass


NEW = ("new Heir", "new", "new method", "new")


def test_a_patch_is_seen_by_its_thread_alone_and_undone_after_an_error() -> None:
    before = dict(vars(Owner))

    def inside() -> None:
        assert (Heir.of(), Heir.plain(), Heir().method(), torch.is_tensor(1)) == NEW
        there = in_threads(lambda: (Heir.of(), Heir.plain(), Heir().method(), torch.is_tensor(1)))
        assert there == [("old Heir", "old", "old method", False)]
        raise KeyError

    with (
        pytest.raises(KeyError),
        patched_here(Owner, "of", classmethod(lambda cls: f"new {cls.__name__}")),
        patched_here(Owner, "plain", staticmethod(lambda: "new")),
        patched_here(Owner, "method", lambda self: "new method"),
        patched_here(torch, "is_tensor", lambda x: "new"),
    ):
        inside()
    assert dict(vars(Owner)) == before
    assert "of" not in vars(Heir)
    assert (Heir.of(), torch.is_tensor(1)) == ("old Heir", False)
