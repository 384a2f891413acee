"""Describe the device, and measure its bandwidth and its speed of matrix products."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch

from benchmarks.gpu.measure import elapsed
from benchmarks.gpu.stage import Given, Row
from benchmarks.machine import machine

PACKAGES = ("triton", "transformers", "expecttest")


def environment(given: Given) -> Iterator[Row]:
    """Yield one row: the device, versions, commit and date."""
    here = machine()
    row = {"commit": given.commit or here["commit"], "python": here["python"]}
    row |= {"torch": torch.__version__, **{name: _version(name) for name in PACKAGES}}
    row |= {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "device": here["device"]}
    if given.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        row |= {"device": found.name, "gib": round(found.total_memory / 2**30), "cuda": torch.version.cuda}
        row |= {"capability": f"{found.major}.{found.minor}", "multiprocessors": found.multi_processor_count}
        row |= {"cudnn": torch.backends.cudnn.version()}
    row |= {"cores": len(os.sched_getaffinity(0)), "system": platform.release()}
    yield {"model": "environment", **row}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def ceilings(given: Given, size: int = 8192, repeats: int = 10) -> Iterator[Row]:
    """Yield the bandwidth of a copy on the device, and the speed of matrix products of random numbers.

    Args:
        given: what every stage is given.
        size: rows and columns of the matrices; the copy reads 16 times the bytes of one in float32.
        repeats: number of measurements, whose median counts.
    """
    device = given.device
    if not given.has("copy"):
        source = torch.randn(16 * size * size, device=device)
        target = torch.empty_like(source)
        spent = _median(lambda: target.copy_(source), device, repeats)
        yield {"model": "copy", "gb_per_second": round(2 * source.nbytes / spent / 1e6, 1)}
        del source, target
    for name, dtype, reduced in (
        ("float16", torch.float16, False),
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("TF32", torch.float32, True),
    ):
        if given.has("matrix product", dtype=name) or (reduced and device != "cuda"):
            continue
        torch.backends.cuda.matmul.allow_tf32 = reduced
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        spent = _median(lambda a=a, b=b: a @ b, device, repeats)
        yield {"model": "matrix product", "dtype": name, "tflops": round(2 * size**3 / spent / 1e9, 2)}


def _median(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return milliseconds, after three calls that do not count."""
    return median([elapsed({"": work}, device)[""] for _ in range(repeats + 3)][3:])
