"""Describe a stage, and the arguments of its function. Nothing here imports torch, for the runner measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Rounds:
    """Rounds of measuring: further ones than the least only while there is time, in seconds.

    In each, so many steps are also ``queued``: run back to back, without waiting for the device in between.
    """

    least: int = 6
    most: int = 10
    seconds: float = 8
    warm_up: int = 3
    queued: int = 0


ROUNDS = Rounds()


@dataclass(frozen=True)
class Stage:
    """Work for one process.

    Attributes:
        name: differs from all other names.
        run: ``module:function``; the function takes a :class:`Given` and the options, and yields rows.
        options: keyword arguments of the function.
        seconds: time limit, from the stage's turn on.
        alone: True if it times something: nothing else then works on the device.
        prepares: True if the function calls ``given.wait()`` itself, after work that leaves the device idle; others are
            called at their turn.
        early: True if it prepares for so long that it starts with the first stages.
        always: True if it runs again with each run of other stages.
        fallback: environment variables with which it is tried once more if it fails. If that helps, all later stages
            have them.
        skip: why the stage cannot run here; empty if it can.
        decided_by: files and folders of the checkout that decide the figures, beside the function's module.
    """

    name: str
    run: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 90
    alone: bool = True
    prepares: bool = False
    early: bool = False
    always: bool = False
    fallback: Mapping[str, str] = field(default_factory=dict[str, str])
    skip: str = ""
    decided_by: Sequence[str] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Files and folders whose changes make the rows old."""
        return (*self.decided_by, f"{self.run.partition(':')[0].replace('.', '/')}.py")

    def function(self) -> Callable[..., Iterator[Row]]:
        """Import the function."""
        module, _, name = self.run.partition(":")
        return getattr(import_module(module), name)


@dataclass(frozen=True)
class Given:
    """The arguments that every stage gets.

    Attributes:
        device: "cuda" or "cpu".
        measured: the rows that exist, by model, side and dtype.
        wait: returns when it is the stage's turn to use the device.
        commit: the commit to note; empty if git is to be asked.
    """

    device: str
    measured: frozenset[tuple[str, str, str]] = frozenset()
    wait: Callable[[], None] = lambda: None
    commit: str = ""

    def has(self, model: str = "", side: str = "", dtype: str = "") -> bool:
        """True if this row exists."""
        return (model, side, dtype) in self.measured
