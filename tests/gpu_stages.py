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
