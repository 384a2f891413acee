"""What the passes of a conversion take: from a captured graph to compiled code, verification included."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest import mock

import torch

from autocastfx.capture.export import Captured
from autocastfx.passes import pipeline
from autocastfx.passes.pipeline import Converter
from autocastfx.passes.state import Pass, Policy, State

__all__ = ["PassTimes", "pass_times", "seconds"]

R = TypeVar("R")
COMPILE, OTHER = "compile", "copy and plan"


@dataclass(frozen=True)
class PassTimes:
    """Seconds of CPU time by pass; what is done around the passes counts as passes too."""

    by_pass: Mapping[str, float]

    @property
    def total(self) -> float:
        """All passes together."""
        return sum(self.by_pass.values())

    @property
    def slowest(self) -> str:
        """The pass that takes most."""
        return max(self.by_pass, key=self.by_pass.__getitem__)


def seconds(work: Callable[[], R]) -> tuple[R, float]:
    """What ``work`` gives, and the CPU time of this thread, which other processes lengthen less than wall time."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def pass_times(converter: Converter, captured: Captured, held: Mapping[str, torch.Tensor]) -> PassTimes:
    """Convert ``captured``, which stays as it is, for the device that it was captured on, and compile the result.

    Args:
        converter: the policy.
        captured: converted.
        held: parameters and buffers by name.
    """
    taken: dict[str, float] = {}

    def timed(step: type[Pass]) -> Callable[[Policy], Callable[[State], State]]:
        def run(policy: Policy, state: State) -> State:
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
    _, taken[COMPILE] = seconds(lambda: variant.mount("variant"))
    return PassTimes(taken)
