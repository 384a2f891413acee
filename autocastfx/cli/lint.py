"""The command ``autocastfx lint``: its arguments, and its run to an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from autocastfx.cli.model_options import converted
from autocastfx.errors import GpuError, ModelSpecError
from autocastfx.report.lint.lint import lint
from autocastfx.report.lint.roofline import find_gpu, gpus

__all__ = ["add_lint_to"]


def add_lint_to(
    add: Callable[..., argparse.ArgumentParser], parents: Sequence[argparse.ArgumentParser], model: str
) -> None:
    """Add the command with ``add``, the subcommands' ``add_parser``; ``model`` is the help text of MODEL."""
    parser = add("lint", parents=parents, help="sizes that tensor cores would pad, and where time would go on a GPU")
    parser.add_argument("model", metavar="MODEL", help=model)
    names = ", ".join(gpu.name for gpu in gpus())
    parser.add_argument("--gpu", default="A100", metavar="GPU", help=f"{names}; A100 by default. It need not be here")
    parser.set_defaults(run=_run_lint)


def _run_lint(options: argparse.Namespace) -> int:
    if not options.inputs:
        raise ModelSpecError("lint reads sizes: give --inputs.")
    try:
        find_gpu(options.gpu)  # before work that may take minutes
        found = lint(converted(options, options.op_list or "default", device="cuda"), options.gpu)
    except GpuError as error:
        raise ModelSpecError(str(error)) from error
    print(found.to_json() if options.json else found)
    return 0
