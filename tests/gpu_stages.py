"""Stages for the tests of ``benchmarks.gpu``: they need no torch, so that their processes start at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.stage import Given, Row


def works(given: Given) -> Iterator[Row]:
    for side in ("a", "b"):
        if not given.has("model", side):
            yield {"model": "model", "side": side, "process": os.getpid()}


def raises(given: Given) -> Iterator[Row]:
    del given
    yield {"model": "model", "side": "a"}
    print("printed before")
    raise RuntimeError("out of memory\nand more")


def crashes(given: Given) -> Iterator[Row]:
    del given
    os.abort()
    yield {}


def hangs(given: Given) -> Iterator[Row]:
    del given
    yield {"model": "model", "side": "a"}
    time.sleep(600)


def prepares(given: Given, folder: str) -> Iterator[Row]:
    """Say that it is prepared by a file, before its turn."""
    with open(os.path.join(folder, "prepared"), "w", encoding="utf-8") as file:
        file.write("yes")
    given.wait()
    yield {"model": "model"}


def sees(given: Given, folder: str) -> Iterator[Row]:
    """Wait for what another stage prepares."""
    del given
    path = os.path.join(folder, "prepared")
    while not os.path.exists(path):
        time.sleep(0.02)
    yield {"model": "model"}


def prepares_long(given: Given, folder: str) -> Iterator[Row]:
    """Prepare for half a second, with a file while it lasts, and yield how many others prepare during its turn."""
    mine = os.path.join(folder, f"preparing {os.getpid()}")
    open(mine, "w", encoding="utf-8").close()
    time.sleep(0.5)
    os.remove(mine)
    given.wait()
    others = 0
    for _ in range(10):
        others += sum(name.startswith("preparing") for name in os.listdir(folder))
        time.sleep(0.05)
    yield {"model": "model", "others": others}


def slow(given: Given, seconds: float = 600) -> Iterator[Row]:
    """Measure two sides at once, and two others much later."""
    for side in "abcd":
        if not given.has("model", side):
            yield {"model": "model", "side": side, "process": os.getpid()}
        if side == "b":
            time.sleep(seconds)


def counts(given: Given, folder: str, most: int) -> Iterator[Row]:
    """Yield how many of these stages work now, once as many have begun as may work at the same time."""
    del given
    mine = os.path.join(folder, f"working {os.getpid()}")
    open(mine, "w", encoding="utf-8").close()
    ends = time.monotonic() + 60
    while sum(name.startswith(("working", "over")) for name in os.listdir(folder)) < most and time.monotonic() < ends:
        time.sleep(0.02)
    time.sleep(0.2)
    yield {"model": os.path.basename(mine), "working": sum(name.startswith("working") for name in os.listdir(folder))}
    os.rename(mine, os.path.join(folder, f"over {os.getpid()}"))


def needs(given: Given, value: str) -> Iterator[Row]:
    """Fail without a value of an environment variable."""
    del given
    if os.environ.get("OTHER_WAY") != value:
        raise RuntimeError("the other way is needed")
    yield {"model": "model"}


def tells(given: Given) -> Iterator[Row]:
    del given
    yield {"model": "model", "way": os.environ.get("OTHER_WAY", "")}
