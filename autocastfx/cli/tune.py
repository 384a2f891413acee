"""The command ``autocastfx tune``: its arguments, and its run to an exit code."""

from __future__ import annotations

import argparse
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from autocastfx.capture.call import arguments_of
from autocastfx.capture.progress import counted
from autocastfx.cli.commands import print_json
from autocastfx.cli.model_options import given_model
from autocastfx.cli.model_spec import load_batches, load_function
from autocastfx.conversion import convert
from autocastfx.errors import ModelSpecError, SensitivityError
from autocastfx.files import check_writable
from autocastfx.numerics.logprob_gap import Inputs, LossFunction
from autocastfx.numerics.plan_search import Budget
from autocastfx.numerics.sensitivity import Measuring, check_fits
from autocastfx.numerics.tune import Tuned, tune
from autocastfx.plan.plan import Plan
from autocastfx.plan.sensitivity import OUTPUT, TARGETS, Sensitivity
from autocastfx.policy.kernel_facts import LEVELS

__all__ = ["add_tune_to"]

_FUNCTIONS = {"loss": "a loss", "inputs": "a function of a batch"}


def add_tune_to(
    add: Callable[..., argparse.ArgumentParser], parents: Sequence[argparse.ArgumentParser], model: str
) -> None:
    """Add the command with ``add``, the subcommands' ``add_parser``; ``model`` is the help text of MODEL."""
    parser = add("tune", parents=parents, help="measure what 16 bits cost each op, and write the list that moves least")
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument(
        "--batches",
        metavar="BATCHES",
        required=True,
        help="package.module:factory, giving a list of batches; the last ones are held out to judge on",
    )
    parser.add_argument(
        "--loss",
        metavar="LOSS",
        help="package.module:factory, giving a function of the output and the batch; by default the model's own loss",
    )
    parser.add_argument(
        "--inputs",
        metavar="INPUTS",
        help="package.module:factory, giving a function of a batch: the part that the model takes; by default all",
    )
    parser.add_argument(
        "--budget",
        default="default",
        metavar="BUDGET",
        help="default: no more error than --op-list has; than another list has, by its name; error=0.01, at most this "
        "error; or bytes=0.8, at most this share of the bytes",
    )
    parser.add_argument("--of", choices=TARGETS, default=TARGETS[0], help="whose error; gradient")
    parser.add_argument("--fold", choices=tuple(LEVELS), default="exact", help="as for convert; exact")
    parser.add_argument("--probes", type=int, default=8, metavar="N", help="random projections for each batch; 8")
    parser.add_argument("--held-out", type=int, default=1, metavar="N", help="batches to judge on; 1")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the op list here, in YAML")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bytes against error here, as SVG")
    parser.add_argument(
        "--sensitivity", type=Path, metavar="FILE", help="keep here what each batch gave, and go on from there"
    )
    parser.set_defaults(run=_run_tune)


def _run_tune(options: Namespace) -> int:
    """Run ``tune``. Returns 0, also if there is nothing to gain: the list is written."""
    budget = _budget(options.budget)
    for name in ("probes", "held_out"):
        if getattr(options, name) < 1:
            raise ModelSpecError(f"--{name.replace('_', '-')} is a number from 1 on, not {getattr(options, name)}.")
    for path in (options.output, options.plot, options.sensitivity):
        if path is not None:
            check_writable(path)
    functions = {name: _function(getattr(options, name), what) for name, what in _FUNCTIONS.items()}
    model, batches = given_model(options, options.model), load_batches(options.batches)
    for batch in batches[:1]:
        _arguments(model, batch, functions["inputs"])  # before work that may take minutes
    how: dict[str, Any] = {"dtype": options.dtype, "op_list": options.op_list or "default"}
    measured = None
    if options.sensitivity is not None:
        measured = _measured(options, model, batches, functions["loss"], functions["inputs"], how)
    found = tune(
        model,
        batches,
        functions["loss"],
        budget=budget,
        of=options.of,
        probes=options.probes,
        held_out=options.held_out,
        sensitivity=measured,
        fold=options.fold,
        inputs=functions["inputs"],
        **how,
    )
    if options.output is not None:
        found.save(options.output)
    if options.plot is not None:
        found.plot(options.plot)
    if options.json:
        print_json(_plain(found))
    else:
        print(found.report())
    return 0


def _budget(given: str) -> str | Budget:
    """Read a budget: the name of a list, or what is limited and its limit.

    Raises:
        ModelSpecError: the limit is not a number above 0.
    """
    name, equals, limit = given.partition("=")
    if not equals or name not in ("error", "bytes"):
        return given
    try:
        number = float(limit)
        if not math.isfinite(number):
            raise ValueError
        return Budget(**{name: number})
    except ValueError:
        raise ModelSpecError(f"--budget {given}: {name} is a finite number above 0, such as {name}=0.1.") from None


def _function(spec: str | None, what: str) -> Callable[..., Any] | None:
    return load_function(spec, what) if spec is not None else None


def _arguments(model: nn.Module, batch: Any, inputs: Inputs | None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return what the model takes of a batch, by position and by keyword.

    Raises:
        ModelSpecError: it does not fit the model.
    """
    args, kwargs = arguments_of(batch if inputs is None else inputs(batch))
    try:
        check_fits(model, args, kwargs)
    except SensitivityError as error:
        raise ModelSpecError(f"{error} Here that is --inputs.") from error
    return args, kwargs


def _measured(
    options: Namespace,
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction | None,
    inputs: Inputs | None,
    how: dict[str, Any],
) -> Sensitivity | None:
    """Measure on the batches that the file lacks, and keep each in the file.

    Raises:
        ModelSpecError: the file cannot be read, or was measured in another way or for another model.
        SensitivityError: a batch cannot be measured.
    """
    file, wanted = options.sensitivity, batches[: -options.held_out]
    known = _known(file)
    if not wanted:
        return known
    args, kwargs = _arguments(model, wanted[0], inputs)
    amp_model = convert(model, args, kwargs or None, **how)
    if known is not None:
        ours = (options.of, amp_model.plan.low, options.probes)
        if (known.of, known.dtype, known.probes) != ours:
            raise ModelSpecError(
                f"{file} was measured for the {known.of} in {known.dtype} by {known.probes} probes, and this command "
                f"asks for the {ours[0]} in {ours[1]} by {ours[2]}: measure into another file."
            )
        if not _is_of(known, amp_model.plan):
            raise ModelSpecError(f"{file} was measured for another model: measure into another file.")
    measuring = Measuring(amp_model, loss_fn, options.of, options.probes, inputs, known)
    try:
        with counted(None, "measuring sensitivity") as show:
            for number, batch in enumerate(wanted, 1):
                if number <= (known.batches if known is not None else 0):
                    continue
                measuring.add(batch)
                cast("Sensitivity", measuring.found).save(file)
                show(number)
    except KeyboardInterrupt:
        if file.exists():
            print(f"autocastfx: the same command goes on from {file}", file=sys.stderr)
        raise
    return _known(file)  # as the next run reads it, so that both print the same


def _is_of(known: Sensitivity, plan: Plan) -> bool:
    """True if most of what was measured is in the plan; graphs for other calls may differ from it."""
    keys = {(node.name, node.op, node.module) for node in plan.nodes}
    replaced = {name for one in plan.recomposed for name in one.replaced}
    found = [effect.key in keys or effect.name in replaced for effect in known.effects if effect.name != OUTPUT]
    return 2 * sum(found) > len(found)


def _known(file: Path) -> Sensitivity | None:
    try:
        return Sensitivity.load(file) if file.exists() else None
    except SensitivityError as error:
        raise ModelSpecError(str(error)) from error


def _plain(found: Tuned) -> dict[str, Any]:
    """The result as data; errors that are not finite are null."""
    points = {"start": found.start, "tuned": found.point, "front": list(found.front)}
    rules = {"op_list": found.text(), "gains": found.gains, "sensitivity": str(found.sensitivity)}
    return {"budget": {"error": found.budget.error, "bytes": found.budget.bytes}, **points, **rules}
