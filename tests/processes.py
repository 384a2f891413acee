"""Runs a function in several processes that talk to one another through gloo.

Importing torch in each of them would take longer than what most tests do there. So one server imports it once, and the
processes are forked from it; the process of the tests, with its threads and hooks, is not forked.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = ["tests.training.distributed_cases", "tests.test_distributed"]


def run_in_processes(function: Callable[..., None], processes: int, folder: Path, *args: Any) -> None:
    """Run ``function(folder, *args)`` in each, with a process group as the default one.

    :raises torch.multiprocessing.ProcessRaisedException: where it raises in one of them, with its traceback.
    :raises torch.multiprocessing.ProcessExitedException: where one of them crashes.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    folder.mkdir(exist_ok=True)
    mp.start_processes(_run, (processes, function, folder, *args), nprocs=processes, start_method="forkserver")


def _run(rank: int, processes: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=60))
    try:
        function(folder, *args)
        # A reducer that outlives the group joins the threads of gloo while it holds the GIL, which they may wait for.
        # Where Python ends while they wait, they abort the process.
        gc.collect()
        time.sleep(0.2)
    finally:
        dist.destroy_process_group()
