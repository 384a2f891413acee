"""Describe the machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Return device, versions, the commit of the working tree, and the date."""
    import torch  # whoever asks for the processor alone needs no torch

    return {
        "device": f"CPU, {len(os.sched_getaffinity(0))} cores of {processor()}, {torch.get_num_threads()} used",
        "torch": version("torch"),
        "python": platform.python_version(),
        **moment(),
    }


def moment() -> dict[str, str]:
    """Return the commit of the working tree and today's date, from which readers see how old a result is."""
    return {"commit": _commit(), "date": datetime.now(timezone.utc).date().isoformat()}


def processor() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


@cache
def changed_since(commit: str, paths: Sequence[str]) -> bool:
    """True if files and folders of the checkout differ from those of a commit; False where git cannot tell."""
    return bool(_git("-C", str(ROOT), "diff", "--name-only", _named(commit), "--", *paths))


def day_of(commit: str) -> str:
    """Return the date of a commit; empty where git cannot tell."""
    return _git("-C", str(ROOT), "show", "-s", "--format=%cs", _named(commit))


def _named(commit: str) -> str:
    return f"{commit.removesuffix('-dirty')}^{{commit}}"


def _commit() -> str:
    """Return the commit of the working tree, with ``-dirty`` if files other than results have changed."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":/!benchmarks/results")
    commit = _git("describe", "--always", "--abbrev=10")
    return commit + ("-dirty" if changed else "") if commit else "unknown"


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
