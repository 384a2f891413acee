"""Run the models of a package in a process of its own, for :mod:`benchmarks.packages`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import packages_distributions, version
from multiprocessing.connection import Connection

import torch

from benchmarks.packages.case import Case
from benchmarks.packages.judge import judge, ways_of
from benchmarks.packages.row import Row

SECONDS = 600  # for a row
Work = tuple[str, str, str]  # the case, the dtype and the way


def _cases(module: str) -> dict[str, Case]:
    found: tuple[Case, ...] = import_module(module).CASES
    return {case.name: case for case in found}


def _child(module: str, ways: Sequence[str], dtypes: Sequence[str], done: set[Work], results: Connection) -> None:
    """Send the work, then a row for each that is not done."""
    torch.set_num_threads(1)
    package = module.rpartition(".")[2]
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        cases = _cases(module)
        every = [(name, dtype, way) for name, case in cases.items() for dtype in dtypes for way in ways_of(case)]
        work = [one for one in every if one[2] in ways and one not in done]
        results.send(work)
        for name, dtype, way in work:
            results.send(judge(package, installed(package), cases[name], getattr(torch, dtype), way))


def installed(package: str) -> str:
    """Return the version of what gives the module of this name; "" if nothing does."""
    return next((version(one) for one in packages_distributions().get(package, ())), "")


def rows_of(module: str, ways: Sequence[str], dtypes: Sequence[str], known: set[Work]) -> Iterator[Row]:
    """Run a package in a process of its own, and in another one where that ends or takes too long."""
    package, done, left = module.rpartition(".")[2], set(known), True
    while left:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_child, args=(module, ways, dtypes, done, theirs))
        process.start()
        theirs.close()
        work: list[Work] | None = None
        try:
            work = _received(ours)
            for one in work:
                row = _received(ours)
                done.add(one)
                yield row
            left = False
        except (EOFError, TimeoutError) as error:
            what = "the time was up" if isinstance(error, TimeoutError) else "the process ended"
            if work is None:
                yield Row(package, installed(package), "", "", "", "not run", 0.0, 0.0, 0.0, f"its cases: {what}")
                return
            stopped = next(one for one in work if one not in done)
            done.add(stopped)
            yield Row(package, installed(package), *stopped, "foreign", 0.0, 0.0, SECONDS, what)
        finally:
            process.kill()
            process.join()


def _received(results: Connection) -> object:
    if not results.poll(SECONDS):
        raise TimeoutError
    return results.recv()
