"""Run stages, each in a process of its own with a time limit.

Stages that time something run alone, one after the other; the others run side by side. A crash or a hang loses one
stage only: its failure is a row, and what it printed is in ``log.txt``. The next stages import, build and capture in
their processes beforehand, some at a time, and wait for their turn: while one times something, the others do nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows
from benchmarks.gpu.stage import Given, Row, Stage

NEARLY = 15  # with fewer seconds left no stage starts
PATIENCE = 60  # seconds after its start for which a process may prepare without being disturbed
LOGGED = 200_000  # characters of a stage's output
FAILED = 70  # exit status of a process that sent its error
# What stages on a CPU import, or torch and transformers when they are first used.
PRELOADED = [
    *("benchmarks.gpu.stages.steps", "benchmarks.gpu.stages.parity"),
    *("torch.export._trace", "torch._inductor.sizevars", "torch._inductor.compiler_bisector"),
    *("sympy.combinatorics", "sympy.tensor.tensor", "transformers.models.bert.modeling_bert"),
]


@dataclass(frozen=True)
class Settings:
    """Settings that all stages of a run share.

    Attributes:
        call: the number of the call.
        out: the folder of the rows.
        device: "cuda" or "cpu".
        card: the device's name, which each row has.
        ends: when the run ends, in ``time.monotonic()``.
        earlier: rows of earlier runs; those of the same card are not measured again.
        ahead: the most stages that prepare beside the next one, besides early ones.
        together: the most stages that work at the same time.
        commit: see :class:`Given`.
    """

    call: int
    out: Path
    device: str
    card: str
    ends: float
    earlier: Sequence[Row] = ()
    ahead: int = 0
    together: int = 1
    commit: str = ""

    def row(self, stage: Stage, found: Row) -> Row:
        """Return a row of a stage, with all that says where it comes from."""
        return {"card": self.card, "call": self.call, "commit": self.commit, "stage": stage.name, **found}


class _Process:
    """A stage's process, which waits for its turn."""

    def __init__(self, stage: Stage, settings: Settings, folder: Path, environment: Mapping[str, str]) -> None:
        # A forked server imports torch once, but a process forked from one that has seen CUDA cannot use CUDA.
        context: Any = multiprocessing.get_context("spawn" if settings.device == "cuda" else "forkserver")
        if settings.device != "cuda":
            context.set_forkserver_preload(PRELOADED)
        self.stage, self.settings = stage, settings
        self.output = folder / f"{stage.name.replace('/', '_')}.txt"
        self.waits, self.error, self.born = False, "", time.monotonic()
        self.turn, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(stage, settings, self.output, theirs, environment))
        self.process.start()
        theirs.close()

    def begin(self) -> None:
        """Let the stage have its turn."""
        self.started = time.monotonic()
        self.limit = min(self.stage.seconds, self.settings.ends - self.started)
        with suppress(OSError):  # it has ended already, with its own error
            self.turn.send(True)

    @property
    def is_preparing(self) -> bool:
        """True until it waits for its turn, has ended, or takes too long."""
        self._hear()
        return not self.waits and self.process.is_alive() and time.monotonic() - self.born < PATIENCE

    def _hear(self) -> None:
        """Note what the process has sent: that it waits, or its error."""
        with suppress(EOFError, OSError):  # it has ended
            while self.turn.poll():
                said = self.turn.recv()
                self.waits, self.error = self.waits or said is True, self.error or (said if said is not True else "")

    def left(self) -> float:
        """Return the seconds until its time is over."""
        return self.started + self.limit - time.monotonic()

    def finish(self) -> Row:
        """Return the row of its end, which is written already, after it has ended or its time is over."""
        is_late = self.process.is_alive()
        self.kill()
        self._hear()
        status = self.process.exitcode
        end: Row = {}
        if is_late:
            why = "the stage's limit" if self.limit == self.stage.seconds else "the minutes are used"
            end["error"] = f"killed after {self.limit:.0f} s: {why}"
        elif status == 0:
            end["done"] = True
        elif status == FAILED and self.error:
            end["error"] = self.error
        else:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            end["error"] = f"the process ended {how}"
        end = self.settings.row(self.stage, {**end, "seconds": round(time.monotonic() - self.started, 1)})
        rows.append(self.settings.out, end)
        said = end.get("error", "done")
        print(f"{self.settings.call} {self.stage.name}: {said}, {end['seconds']} s", file=sys.stderr, flush=True)
        printed = self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""
        if printed:
            _log(self.settings.out, f"---- {self.settings.call} {self.stage.name}: {said}\n{printed[-LOGGED:]}\n")
        return end

    def kill(self) -> None:
        """End the process, and what it started."""
        if (number := self.process.pid) is not None:
            with suppress(ProcessLookupError):  # nothing is left of it, or it has no group yet
                os.killpg(number, signal.SIGKILL)
            self.process.kill()
            self.process.join()


def _work(stage: Stage, settings: Settings, output: Path, turn: Connection, environment: Mapping[str, str]) -> None:
    """Write the rows of a stage, in its process; send an error, if there is one."""
    os.setpgrp()
    os.environ.update(environment)
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    is_waiting = True

    def wait() -> None:
        nonlocal is_waiting
        if is_waiting:
            turn.send(True)
            turn.recv()  # EOFError if the runner has ended
            is_waiting = False

    measured = rows.measured(settings.earlier, settings.card, stage.name)
    try:
        if settings.device == "cpu":
            import torch  # it is there already: see PRELOADED

            torch.set_num_threads(1)
        function = stage.function()
        if not stage.prepares:
            wait()
        for row in function(Given(settings.device, measured, wait, settings.commit), **stage.options):
            rows.append(settings.out, settings.row(stage, row))
    except Exception as error:
        traceback.print_exc()
        turn.send(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(FAILED)


def _end_with_the_runner() -> None:
    """Kill this process, and what it started, once the runner is gone: it would keep the device busy."""
    runner = multiprocessing.parent_process()
    if runner is not None:
        runner.join()
        os.killpg(os.getpid(), signal.SIGKILL)


def run(stages: Sequence[Stage], settings: Settings) -> list[Row]:
    """Run the stages that have not ended before on this card, and return the row of each one's end.

    A stage that had an error before runs again, without what it measured then.
    """
    ended = rows.ended(settings.earlier, settings.card)
    left = [stage for stage in stages if stage.name not in ended]
    with tempfile.TemporaryDirectory() as folder:
        return _Run(settings, Path(folder), deque(s for s in stages if s in left or (s.always and left))).ends()


class _Run:
    """Stages in their order: those to come, of which some prepare, and those that work."""

    def __init__(self, settings: Settings, folder: Path, pending: deque[Stage]) -> None:
        self.settings, self.folder, self.pending = settings, folder, pending
        self.prepared: dict[str, _Process] = {}
        self.working: list[_Process] = []
        self.found: list[Row] = []
        self.environment: Mapping[str, str] = {}
        self.trial = ""  # the stage that tries the environment

    def ends(self) -> list[Row]:
        """Run all, and return the row of each one's end."""
        try:
            while self.pending or self.working:
                if self.pending and self.settings.ends - time.monotonic() < NEARLY:
                    names = ", ".join(stage.name for stage in self.pending)
                    _log(self.settings.out, f"{self.settings.call}: not started: {names}\n")
                    self.pending.clear()
                while self._prepare():
                    process = self.prepared.pop(self.pending.popleft().name)
                    process.begin()
                    self.working.append(process)
                if self.working:
                    self._finish()
                elif self.pending:
                    time.sleep(0.05)  # until nothing prepares
        finally:
            for process in (*self.prepared.values(), *self.working):
                process.kill()
        return self.found

    def _prepare(self) -> bool:
        """Start the processes of the next stages, and of early ones. Return True if the first of them has its turn.

        Where that stage is alone and already prepared, no others are started until it is over.
        """
        while self.pending and self.pending[0].skip:
            stage = self.pending.popleft()
            self.found.append(self.settings.row(stage, {"skipped": stage.skip}))
            rows.append(self.settings.out, self.found[-1])
        if not self.pending:
            return False
        if any(process.stage.alone for process in self.working):
            return False
        first = self.pending[0]
        decides = first.fallback or self.trial  # what comes first decides on the environment of all
        is_quiet = first.alone and not self.working and first.name in self.prepared
        for place, stage in enumerate(stage for stage in self.pending if not stage.skip):
            starts = not is_quiet and (place <= self.settings.ahead or (stage.early and not decides))
            if starts and stage.name not in self.prepared:
                self.prepared[stage.name] = _Process(stage, self.settings, self.folder, self.environment)
        if first.alone:
            is_disturbed = any(process.is_preparing for process in self.prepared.values())
            return not self.working and (bool(first.fallback) or not is_disturbed)
        return len(self.working) < self.settings.together

    def _finish(self) -> None:
        """Wait until a process has ended, or its time is over, and note its end."""
        soonest = min(process.left() for process in self.working)
        wait_for([process.process.sentinel for process in self.working], timeout=max(0.0, soonest))
        for process in [one for one in self.working if not one.process.is_alive() or one.left() <= 0]:
            self.working.remove(process)
            end, stage = process.finish(), process.stage
            self.found.append(end)
            if stage.fallback and "error" in end:
                self._prepare_anew(stage.fallback)
                self.trial = f"{stage.name}, {' '.join('='.join(item) for item in stage.fallback.items())}"
                self.pending.appendleft(replace(stage, name=self.trial, fallback={}))
            elif stage.name == self.trial:
                self.trial = ""
                if "error" in end:
                    self._prepare_anew({})

    def _prepare_anew(self, environment: Mapping[str, str]) -> None:
        for process in self.prepared.values():
            process.kill()
        self.prepared.clear()
        self.environment = environment


def _log(folder: Path, text: str) -> None:
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(text)
