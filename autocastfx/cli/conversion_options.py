"""Options of the command line that are arguments of ``convert``."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autocastfx.capture.call import named_device
from autocastfx.cli.factory_call import is_factory_call
from autocastfx.cli.model_spec import load_batches, load_inputs
from autocastfx.errors import ModelSpecError
from autocastfx.passes.patterns.patterns import chosen
from autocastfx.policy.kernel_facts import LEVELS

__all__ = ["add_conversion_options", "conversion_arguments", "given_options"]

_NAMES = ("device", "fold", "recompose", "calibrate", "plan")


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("--device", metavar="DEVICE", help="decide for the kernels of this device; the model's")
    parser.add_argument("--fold", choices=tuple(LEVELS), help="where a deny op may take and give 16 bits; exact")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--recompose", nargs="+", metavar="NAME", help="use these patterns alone, of all of convert's")
    which.add_argument(
        "--no-recompose", dest="recompose", action="store_false", default=None, help="replace nothing by one operator"
    )
    parser.add_argument(
        "--calibrate",
        nargs="+",
        metavar="INPUTS",
        help="measure how large values are: on batches, each as --inputs (a factory may give a list of them); or a "
        "file of ranges",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="an edited plan of dump --format json")


def given_options(options: Namespace) -> list[str]:
    """Return the options of these that were given, as they are written."""
    given = [name for name in _NAMES if getattr(options, name, None) is not None]
    return ["--no-recompose" if getattr(options, name) is False else f"--{name}" for name in given]


def conversion_arguments(options: Namespace, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments for ``convert``; those that were not given are left out.

    Args:
        options: parsed arguments; a command may lack these.
        device: where the model is.

    Raises:
        ModelSpecError: one cannot be used.
        CaptureError: a factory of batches raises.
    """
    given = {name: getattr(options, name, None) for name in _NAMES}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "device" in found:
        try:
            named_device(found["device"])
        except ValueError as error:
            raise ModelSpecError(f"--{error}.") from None
    if found.get("recompose"):
        try:
            chosen(found["recompose"])
        except ValueError as error:
            raise ModelSpecError(f"--{error}.") from error
    if "calibrate" in found:
        found["calibrate"] = _calibration(found["calibrate"], device)
    return found


def _calibration(specs: Sequence[str], device: torch.device) -> Any:
    """Return the path of a file of ranges, or batches."""
    if len(specs) == 1 and not is_factory_call(specs[0]) and "[" not in specs[0]:
        if not Path(specs[0]).is_file():
            raise ModelSpecError(
                f"--calibrate {specs[0]}: there is no such file of ranges, and it is no form of inputs."
            )
        return specs[0]
    if all(map(is_factory_call, specs)):
        return [batch for spec in specs for batch in load_batches(spec)]
    return [load_inputs(specs, device)]
