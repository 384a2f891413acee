"""Time the passes of a conversion, from a captured graph to compiled code, verification included."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest import mock

import torch

from autocastfx.capture.call import CallSignature
from autocastfx.capture.export import Captured
from autocastfx.passes import pipeline
from autocastfx.passes.pipeline import Converter
from autocastfx.passes.state import Pass, Settings, State

__all__ = ["PassTimes", "pass_times", "seconds"]

R = TypeVar("R")
COMPILE, OTHER = "compile", "copy and plan"


@dataclass(frozen=True)
class PassTimes:
    """Seconds of CPU time by pass; the work around the passes counts as passes too."""

    by_pass: Mapping[str, float]

    @property
    def total(self) -> float:
        """The time of all passes together."""
        return sum(self.by_pass.values())

    @property
    def slowest(self) -> str:
        """The slowest pass."""
        return max(self.by_pass, key=self.by_pass.__getitem__)


def seconds(work: Callable[[], R]) -> tuple[R, float]:
    """Run ``work``; return its result and its CPU time, which other processes affect less than wall time."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def pass_times(converter: Converter, captured: Captured, held: Mapping[str, torch.Tensor]) -> PassTimes:
    """Time converting and compiling ``captured``, which is not changed, for the device that it was captured on.

    Args:
        converter: the policy.
        captured: the graph to convert.
        held: parameters and buffers by name.
    """
    taken: dict[str, float] = {}

    def timed(step: type[Pass]) -> Callable[[Settings], Callable[[State], State]]:
        def run(policy: Settings, state: State) -> State:
            made, spent = seconds(lambda: step(policy)(state))
            taken[step.name] = taken.get(step.name, 0.0) + spent
            return made

        return lambda policy: partial(run, policy)

    with (
        mock.patch.object(pipeline, "PIPELINE", tuple(map(timed, pipeline.PIPELINE))),
        mock.patch.object(pipeline, "FOLLOW_PIPELINE", tuple(map(timed, pipeline.FOLLOW_PIPELINE))),
    ):
        variant, spent = seconds(lambda: converter(captured, held, captured.device))
    taken[OTHER] = spent - sum(taken.values())
    _, taken[COMPILE] = seconds(lambda: variant.mount("variant", CallSignature(())))  # which no call reads
    return PassTimes(taken)
