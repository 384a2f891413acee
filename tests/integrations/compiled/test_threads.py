"""Threads that enable models of their own, beside others that compile, do not disturb each other."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import autocastfx
from autocastfx.capture.leave_intact import Shared
from tests.integrations.threads import Broken, Skipped, X

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_threads_that_enable_and_compile_end_without_a_crash(rounds: int) -> None:
    command = [sys.executable, "-m", "tests.integrations.threads", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["0 errors"]), done.stdout + done.stderr[-2000:]


FIRST_IMPORT = """
import threading, torch, autocastfx
one, other, x = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.ones(2, 4)
def convert():
    autocastfx.convert(one, x, dtype="bfloat16", check=False)
    print("converted")
thread = threading.Thread(target=convert)
thread.start()
torch.compile(other, backend="eager")(x)
print("compiled")
thread.join()
"""


def test_a_first_conversion_beside_a_first_compilation() -> None:
    """Both import Dynamo, in one order: it and Inductor import each other."""
    done = subprocess.run([sys.executable, "-c", FIRST_IMPORT], capture_output=True, text=True, check=False)
    assert sorted(done.stdout.split()) == ["compiled", "converted"], done.stderr[-2000:]


def test_what_another_thread_cannot_capture_is_not_told_of_this_model() -> None:
    """The other thread compiles, and fails, while this one is inside of its model's call."""

    class Waiting(Broken):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            compile_another()
            return self.last(x)

    def compile_in_thread() -> None:
        thread = threading.Thread(target=lambda: torch.compile(Skipped(), backend="eager")(X))
        thread.start()
        thread.join()

    compile_another = torch.compiler.disable(compile_in_thread)

    model = autocastfx.enable(Waiting(), dtype=torch.bfloat16)
    with pytest.warns(autocastfx.errors.UncapturedGraphWarning, match=r"torch\.compiler\.disable"):
        model(X)
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert {one.name for one in backend.skipped} == {"forward"}
    assert all(one.is_excluded for one in backend.skipped)


def test_a_shared_context_is_closed_by_the_last_that_leaves_it() -> None:
    closed: list[bool] = []

    @contextmanager
    def noting() -> Generator[None]:
        yield
        closed.append(True)

    shared = Shared(noting)
    with shared:
        thread = threading.Thread(target=shared.__enter__)
        thread.start()
        thread.join()
    assert not closed
    shared.__exit__()
    assert closed == [True]
