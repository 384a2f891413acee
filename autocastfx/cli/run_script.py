"""``autocastfx run``: run a script whose models are converted at their first calls."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from autocastfx.capture.call import conversion_is_off
from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.files import check_writable, write_whole
from autocastfx.integrations.backend import UNCAPTURED, CompileBackend
from autocastfx.integrations.script import ScriptRun
from autocastfx.policy.kernel_facts import LEVELS
from autocastfx.policy.op_list import load_op_list

__all__ = ["add_run_to", "prepare"]


def add_run_to(add: Callable[..., Any], common: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser = add("run", parents=[common], help="run a script, with each of its models converted at its first call")
    parser.add_argument(
        "--dtype",
        choices=tuple(map(dtype_name, LOW_DTYPES)),
        default="bfloat16",
        help="the 16-bit dtype; float16 needs a GradScaler in the script",
    )
    parser.add_argument(
        "--op-list", action="append", metavar="LIST", help="a preset or a YAML file; given again, the later wins"
    )
    parser.add_argument("--fold", choices=tuple(LEVELS), default="exact")
    parser.add_argument("--inner", default="eager", help="the backend of torch.compile that compiles the result")
    parser.add_argument("--uncaptured", choices=UNCAPTURED, default="autocast")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what became of each model, as JSON")
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=prepare)


def prepare(options: Namespace) -> Callable[[], int]:
    """Check the arguments of ``run SCRIPT …`` before the script runs, and return what runs it.

    What the script raises, and its exit code, are as without this command.

    Raises:
        OpListError: a list is wrong.
        OSError: there is no such script, or the report cannot be written.
        UnsupportedError: a list names Python functions.
    """
    if not (options.is_module or Path(options.script).is_file()):
        raise FileNotFoundError(f"there is no script {options.script}; a module takes -m")
    if options.report is not None:
        check_writable(options.report)
    low: torch.dtype = getattr(torch, options.dtype)
    lists = load_op_list(options.op_list or "default", default=options.dtype)

    def make() -> CompileBackend:
        return CompileBackend(
            dtype=low, op_list=lists, fold=options.fold, inner=options.inner, uncaptured=options.uncaptured
        )

    make()
    if conversion_is_off():
        return partial(_run_script, options)
    return partial(_run_converted, options, ScriptRun(low, make))


def _run_converted(options: Namespace, script_run: ScriptRun) -> int:
    try:
        with script_run.active():
            return _run_script(options)
    finally:
        report = script_run.report()
        print("\n".join(f"autocastfx: {line}" for line in str(report).splitlines()), file=sys.stderr)
        if options.report is not None:
            write_whole(options.report, report.to_json())


def _run_script(options: Namespace) -> int:
    """Run the script as ``python SCRIPT ...`` does."""
    folder = os.getcwd() if options.is_module else str(Path(options.script).resolve().parent)
    arguments, path = [options.script, *options.arguments], [folder, *sys.path[1:]]
    with patch.object(sys, "argv", arguments), patch.object(sys, "path", path):
        if options.is_module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    return 0
