"""Run stages one after the other, each in a process of its own with a time limit.

A crash or a hang loses one stage only: its failure is a row, and the end of what it printed is in ``log.txt``. While a
stage measures, the next ones may already import, build and capture in their processes, and wait for their turn.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows
from benchmarks.gpu.stage import Given, Row, Stage

__all__ = ["Settings", "run"]

NEARLY = 15  # with fewer seconds left no stage starts
LOGGED = 4000  # characters of a failed stage's output
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
        call: the letter of the call.
        out: the folder of the rows.
        device: "cuda" or "cpu".
        ends: when the run ends, in ``time.monotonic()``.
        earlier: rows of earlier runs, which are not measured again.
        ahead: the most stages that prepare while another measures.
        commit: see :class:`Given`.
    """

    call: str
    out: Path
    device: str
    ends: float
    earlier: Sequence[Row] = ()
    ahead: int = 0
    commit: str = ""


class _Process:
    """A stage's process, which waits for its turn."""

    def __init__(self, stage: Stage, settings: Settings, folder: Path) -> None:
        # A forked server imports torch once, but a process forked from one that has seen CUDA cannot use CUDA.
        context: Any = multiprocessing.get_context("spawn" if settings.device == "cuda" else "forkserver")
        if settings.device != "cuda":
            context.set_forkserver_preload(PRELOADED)
        self.stage, self.settings = stage, settings
        self.output = folder / f"{stage.name.replace('/', '_')}.txt"
        self.turn, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(stage, settings, self.output, theirs))
        self.process.start()
        theirs.close()

    def finish(self) -> Row:
        """Let the stage have its turn, and return the row of its end, which is written already."""
        left = self.settings.ends - time.monotonic()
        limit, started = min(self.stage.seconds, left), time.monotonic()
        with suppress(OSError):  # it has ended already, with its own error
            self.turn.send(True)
        self.process.join(limit)
        is_late = self.process.is_alive()
        self.kill()
        seconds = round(time.monotonic() - started, 1)
        status = self.process.exitcode
        end: Row = {"call": self.settings.call, "stage": self.stage.name}
        if is_late:
            why = "the stage's limit" if limit == self.stage.seconds else "the minutes are used"
            end["error"] = f"killed after {limit:.0f} s: {why}"
        elif status == 0:
            end["done"] = True
        elif status == FAILED and self.turn.poll():
            end["error"] = self.turn.recv()
        else:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            end["error"] = f"the process ended {how}"
        end["seconds"] = seconds
        rows.append(self.settings.out, end)
        return end

    def kill(self) -> None:
        """End the process, and what it started."""
        if (number := self.process.pid) is not None:
            with suppress(ProcessLookupError):  # nothing is left of it, or it has no group yet
                os.killpg(number, signal.SIGKILL)
            self.process.kill()
            self.process.join()


def _work(stage: Stage, settings: Settings, output: Path, turn: Connection) -> None:
    """Write the rows of a stage, in its process; send an error, if there is one."""
    os.setsid()
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    is_waiting = True

    def wait() -> None:
        nonlocal is_waiting
        if is_waiting:
            turn.recv()  # EOFError if the runner has ended
            is_waiting = False

    held = rows.held(settings.earlier, settings.call, stage.name)
    try:
        if settings.device == "cpu":
            import torch  # it is there already: see PRELOADED

            torch.set_num_threads(1)
        function = stage.function()
        if not stage.prepares:
            wait()
        for row in function(Given(settings.device, held, wait, settings.commit), **stage.options):
            rows.append(settings.out, {"call": settings.call, "stage": stage.name, **row})
    except Exception as error:
        traceback.print_exc()
        turn.send(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(FAILED)


def run(stages: Sequence[Stage], settings: Settings) -> list[Row]:
    """Run the stages that have not ended before, and return the row of each one's end.

    A stage that had an error before runs again, without what it measured then.
    """
    ended = rows.ended(settings.earlier)
    left = [stage for stage in stages if (settings.call, stage.name) not in ended]
    pending = deque(stage for stage in stages if stage in left or (stage.always and left))
    found: list[Row] = []
    started: deque[_Process] = deque()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while pending or started:
                if settings.ends - time.monotonic() < NEARLY:
                    names = [*(one.stage.name for one in started), *(stage.name for stage in pending)]
                    _log(settings.out, f"{settings.call}: not started: {', '.join(names)}\n")
                    break
                while pending and len(started) <= settings.ahead:
                    stage = pending.popleft()
                    if stage.skip:
                        found.append({"call": settings.call, "stage": stage.name, "skipped": stage.skip})
                        rows.append(settings.out, found[-1])
                    else:
                        started.append(_Process(stage, settings, Path(folder)))
                if started:
                    found.append(_finished(started.popleft()))
        finally:
            for one in started:
                one.kill()
    return found


def _finished(one: _Process) -> Row:
    end, call, name = one.finish(), one.settings.call, one.stage.name
    said = end.get("error", "done")
    print(f"{call} {name}: {said}, {end['seconds']} s", file=sys.stderr, flush=True)
    if "error" in end:
        printed = one.output.read_text(encoding="utf-8", errors="replace") if one.output.exists() else ""
        _log(one.settings.out, f"---- {call} {name}: {said}\n{printed[-LOGGED:]}\n")
    return end


def _log(folder: Path, text: str) -> None:
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(text)
