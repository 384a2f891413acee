"""Measure each op's kernels in processes that a failing kernel may take along."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from benchmarks.gpu.measure import said
from benchmarks.gpu.stage import Given, Row
from benchmarks.gpu.stages.samples import stand_in

__all__ = ["isolated"]


@dataclass
class _Worker:
    """A process, the ops that it has not ended, of which the first is being measured, and when it must have answered.

    One that has collected its calls is ready: what fails then is an op, and another process can do the rest.
    """

    process: Any
    connection: Any
    left: list[str]
    until: float
    is_ready: bool = False


def isolated(
    given: Given,
    ops: Sequence[str] = (),
    samples: int = 12,
    processes: int = 8,
    start: float = 120,
    seconds: float = 20,
) -> Iterator[Row]:
    """Yield a row for each op and dtype: whether it has a kernel, and how far it is from a float32 kernel's result.

    Args:
        given: what every stage is given.
        ops: base names; all listed ones by default.
        samples: of each of torch's test operators.
        processes: that run at the same time.
        start: limit for a process until its first op, in seconds.
        seconds: limit for an op.
    """
    with stand_in():
        from benchmarks.kernel_facts import LISTED

        names = [op for op in ops or sorted(LISTED) if not all(given.has(op, dtype=d) for d in ("float16", "bfloat16"))]
        context: Any = multiprocessing.get_context("spawn" if given.device == "cuda" else "fork")

        def worker(left: list[str]) -> _Worker:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, left, given.device, samples))
            process.start()
            theirs.close()
            return _Worker(process, ours, left, time.monotonic() + start)

        workers = [worker(part) for n in range(processes) if (part := names[n::processes])]
        while workers:
            ready = wait([one.connection for one in workers], timeout=1)
            for one in list(workers):
                is_over = time.monotonic() > one.until
                if one.connection in ready:
                    found, is_over = _received(one, seconds)
                    yield from found
                elif is_over and one.left:
                    yield _lost(one, "no answer in time")
                if is_over:
                    one.process.kill()
                    one.process.join()
                    workers.remove(one)
                    if one.is_ready and (left := one.left[1:]):
                        workers.append(worker(left))


def _received(one: _Worker, seconds: float) -> tuple[list[Row], bool]:
    """Return the rows that arrived, and whether the process is over."""
    one.until = time.monotonic() + seconds
    try:
        found, is_over = one.connection.recv()
    except EOFError:
        one.process.join()
        return ([_lost(one, f"the process ended with status {one.process.exitcode}")] if one.left else []), True
    if one.is_ready and not is_over:
        del one.left[0]
    one.is_ready = True
    return found, is_over


def _lost(one: _Worker, why: str) -> Row:
    """Return the row of the op that was being measured, or of the collecting of calls."""
    return {"model": one.left[0] if one.is_ready else f"calls of {len(one.left)} ops", "error": why}


def _work(connection: Any, ops: Sequence[str], device: str, samples: int) -> None:
    """Send that it is ready, then the rows of each op, and whether the device has failed, which ends its use."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with stand_in():
        from benchmarks.kernel_calls import kernel_calls
        from benchmarks.kernel_facts import DTYPES, rounds_once, without_kernel

        calls = kernel_calls(frozenset(ops), device, samples)
        connection.send(([], False))
        for op in ops:
            rows, has_failed = list[Row](), False
            for name, dtype in DTYPES.items():
                row: Row = {"model": op, "dtype": name, "calls": len(calls.get(op, []))}
                try:
                    row["missing"] = without_kernel({op: calls.get(op, [])}, dtype).get(op, "")
                    if not row["missing"]:
                        row["ulps"] = max((rounds_once(call, dtype) for call in calls.get(op, [])), default=0.0)
                    if device == "cuda":
                        torch.cuda.synchronize()  # a kernel that failed is noticed here
                except (RuntimeError, TypeError) as error:
                    row["error"] = said(error)
                    has_failed = has_failed or _has_failed(device)
                rows.append(row)
            connection.send((rows, has_failed))


def _has_failed(device: str) -> bool:
    """True if the device takes no more work of this process."""
    import torch

    if device != "cuda":
        return False
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError:
        return True
    return False
