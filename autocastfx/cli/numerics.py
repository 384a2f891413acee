"""The commands `compare`, `check`, `time` and `bisect`: their arguments, and their runs to an exit code."""

from __future__ import annotations

import argparse
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.call import arguments_of, device_of
from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.capture.progress import counted
from autocastfx.cli.commands import print_json
from autocastfx.cli.model import (
    add_conversion_options,
    conversion_arguments,
    converted,
    given_model,
    load_batches,
    load_function,
    load_inputs,
)
from autocastfx.cli.parser import CONVERSION, MODEL, WRITTEN, add_factory, add_file, group
from autocastfx.conversion import convert
from autocastfx.dtypes import chosen_dtype, dtype_name
from autocastfx.errors import BisectError, EvaluationsError, ModelSpecError, SensitivityError
from autocastfx.files import NON_FINITE_AS_TEXT, check_writable, plain_data
from autocastfx.numerics.bisect import METRICS, OutputDistance, bisect
from autocastfx.numerics.check import check
from autocastfx.numerics.compare import compare
from autocastfx.numerics.find_overflow import find_overflow
from autocastfx.numerics.logprob_gap import Inputs, LossFunction
from autocastfx.numerics.plan_search import Budget
from autocastfx.numerics.sensitivity import Measuring, check_fits
from autocastfx.numerics.time import time
from autocastfx.numerics.tune import Tuned, check_share, tune
from autocastfx.plan.plan import Plan
from autocastfx.plan.sensitivity import OUTPUT, TARGETS, Sensitivity
from autocastfx.policy.float8 import RECIPES, recipe_of
from autocastfx.policy.kernel_facts import LEVELS
from autocastfx.policy.op_list import load_op_list
from autocastfx.report.dump import dump

_OF_A_SEARCH = ("model", "inputs", "weights", "mode", "metric", "seed")  # arguments that identify a search


def add_to(
    add: Callable[..., argparse.ArgumentParser],
    parents: Sequence[argparse.ArgumentParser],
    model: argparse.ArgumentParser,
) -> None:
    """Add the commands with ``add``, the subcommands' ``add_parser``; ``model`` has the argument MODEL."""
    seeded = argparse.ArgumentParser(add_help=False)
    group(seeded, MODEL).add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random numbers of each run; 0"
    )

    with_seed = [*parents, seeded, model]
    parser = add("compare", parents=with_seed, help="run a model in 16 bits and in float32, and compare each value")
    parser.add_argument("--gradients", action="store_true", help="compare gradients as well")
    add_factory(parser, "loss", "a function of the output, for gradients; by default the output's sum")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="a loss scale, for gradients; 1")
    written = group(parser, WRITTEN)
    written.add_argument("--most", type=int, default=20, metavar="N", help="show as many; 20")
    written.add_argument("--in-order", action="store_true", help="show the first ones, not the worst")
    add_file(written, "--page", help="also write the page of dump, with these numbers")
    add_conversion_options(parser)
    parser.set_defaults(run=_compare)

    parser = add("check", parents=[*parents, model], help="run a model beside its conversion, and say what differs")
    add_conversion_options(parser)
    parser.set_defaults(run=_check_model)

    parser = add("time", parents=[*parents, model], help="time a model in float32, under torch.autocast and converted")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often each way is timed; 15")
    parser.add_argument("--compiled", action="store_true", help="also under torch.compile, in a minute or more")
    add_file(group(parser, WRITTEN), "--page", help="also write the page of dump, with these times")
    add_conversion_options(parser)
    parser.set_defaults(run=_time)

    parser = add("bisect", parents=with_seed, help="find the ops that have to run in float32, and write a list")
    parser.add_argument(
        "--tolerance", type=float, required=True, metavar="T", help="the largest value of the metric that holds"
    )
    parser.add_argument(
        "--metric",
        default="error",
        metavar="METRIC",
        help="error (of the output, relative to its norm in float32; default), difference (the largest one of an "
        "element of the output), or package.module:factory, giving a function of a converted model, where less is "
        "better",
    )
    add_file(group(parser, WRITTEN), "-o", "--output", required=True, help="the op list, in YAML")
    add_file(parser, "--resume", help="keep evaluations here, and go on from them")
    parser.set_defaults(run=_bisect)


def _compare(options: Namespace) -> int:
    """Run ``compare``. Returns 1 if a value or gradient is Inf or NaN where float32's is finite."""
    if not options.gradients and (options.loss is not None or options.scale != 1.0):
        raise ModelSpecError("--loss and --scale are for gradients: give --gradients.")
    if options.most < 0:
        raise ModelSpecError(f"--most is a number from 0 on, not {options.most}.")
    if not 0 < options.scale < math.inf:
        raise ModelSpecError(f"--scale is a finite number above 0, not {options.scale}.")
    _check(options, "compare runs the model")
    how: dict[str, Any] = {"gradients": True} if options.gradients else {}
    if options.scale != 1.0:
        how["scale"] = options.scale
    if options.loss is not None:
        how["loss"] = load_function(options.loss, "a loss")
    model = given_model(options, options.model)
    amp_model = converted(options, options.op_list or "default", model)
    args, kwargs = load_inputs(options.inputs, device_of(model))
    if taken := sorted(how.keys() & kwargs.keys()):
        raise ModelSpecError(f"the model has an input called {taken[0]!r} itself: leave --{taken[0]} away.")
    with random_numbers_kept():
        torch.manual_seed(options.seed)  # both calls below restore the random state that they start from
        comparison = compare(None, amp_model, *args, **how, **kwargs)
        overflow = (
            None if options.json or comparison.first_non_finite is None else find_overflow(amp_model, *args, **kwargs)
        )
    if options.page is not None:
        dump(amp_model, options.page, "html", comparison=comparison)
    if options.json:
        print(comparison.to_json())
        return int(not comparison.is_finite)
    print(comparison.table(options.most, in_order=options.in_order))
    if options.gradients:
        print("\ngradients", comparison.table(options.most, in_order=options.in_order, gradients=True), sep="\n")
    if overflow is not None:
        print(f"\n{overflow}")
    return int(not comparison.is_finite)


def _check_model(options: Namespace) -> int:
    """Run ``check``. Returns 1 if the conversion does something else than the model, or is less exact than allowed."""
    _check(options, "check runs the model")
    model = given_model(options, options.model)
    place = device_of(model)
    how = conversion_arguments(options, place)
    batch = load_inputs(options.inputs, place)
    findings = check(model, [batch], dtype=options.dtype, op_list=options.op_list or "default", **how)
    print(findings.to_json() if options.json else findings)
    return int(not findings.ok)


def _time(options: Namespace) -> int:
    """Run ``time``."""
    _check(options, "time runs the model")
    if options.rounds < 2:
        raise ModelSpecError(f"--rounds is a number from 2 on, not {options.rounds}.")
    model = given_model(options, options.model)
    place = device_of(model)
    how = conversion_arguments(options, place) | {"rounds": options.rounds, "compiled": options.compiled}
    batch = load_inputs(options.inputs, place)
    timing = time(model, [batch], dtype=options.dtype, op_list=options.op_list or "default", **how)
    if options.page is not None:
        dump(converted(options, options.op_list or "default", model), options.page, "html", timing=timing)
    print(json.dumps(plain_data(timing), indent=1) if options.json else timing)
    return 0


def _bisect(options: Namespace) -> int:
    """Run ``bisect``. Returns 1 if the metric does not hold even in float32."""
    if not math.isfinite(options.tolerance):
        raise ModelSpecError(f"--tolerance is a finite number, not {options.tolerance}.")
    if options.tolerance < 0 and options.metric in METRICS:
        raise ModelSpecError(f"--tolerance of the metric {options.metric} is from 0 on, not {options.tolerance}.")
    _check(options, "bisect runs the model")
    # the model, and what tells how far it is off
    own = load_function(options.metric, "a metric") if options.metric not in METRICS else None
    model = given_model(options, options.model)
    place = device_of(model)
    low = chosen_dtype(options.dtype, place)
    lists = load_op_list(options.op_list or "default", default=dtype_name(low))
    args, kwargs = load_inputs(options.inputs, place)
    metric = own or OutputDistance(model, args, kwargs, options.metric, options.seed)
    try:
        with _shown() as show:
            bisection = bisect(
                model,
                args,
                metric,
                options.tolerance,
                example_kwargs=kwargs,
                dtype=low,
                op_list=lists,
                state=options.resume,
                label=", ".join(f"{name} {given}" for name, given in vars(options).items() if name in _OF_A_SEARCH),
                report=show,
            )
    except KeyboardInterrupt:
        if options.resume is not None and options.resume.exists():
            print(f"autocastfx: the same command goes on from {options.resume}", file=sys.stderr)
        raise
    except EvaluationsError:
        raise
    except BisectError as error:
        print(f"autocastfx: error: {error}", file=sys.stderr)
        return 1
    # the list, and what was found
    bisection.op_list.save(options.output)
    if options.json:
        names = ("places", "metric", "low", "float32", "evaluations")
        print(json.dumps(plain_data({name: getattr(bisection, name) for name in names}, NON_FINITE_AS_TEXT), indent=1))
        return 0
    print(bisection)
    print(f"{options.output}: give it after the others, as in --op-list default {options.output}")
    return 0


def _check(options: Namespace, why: str) -> None:
    """Refuse missing inputs and unwritable paths, before work that may take minutes."""
    if not options.inputs:
        raise ModelSpecError(f"{why}: give --inputs.")
    for path in (getattr(options, name, None) for name in ("output", "resume", "page")):
        if path is not None:
            check_writable(path)


@contextmanager
def _shown() -> Generator[Callable[[int, int], None]]:
    """Show the progress of a search in a line on standard error."""
    shown = False

    def show(made: int, left: int) -> None:
        nonlocal shown
        shown = True
        still = f"at most {left} more for the place searched for" if left else "checking"
        print(f"\rautocastfx: {made} evaluations made, {still:<45}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print(file=sys.stderr)


# The command ``autocastfx tune``: its arguments, and its run to an exit code.


def add_tune_to(add: Callable[..., argparse.ArgumentParser], parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the command with ``add``, the subcommands' ``add_parser``."""
    parser = add("tune", parents=parents, help="measure what 16 bits cost each op, and write the list that moves least")
    add_factory(parser, "batches", "a list of batches; the last ones are held out to judge on", required=True)
    add_factory(parser, "loss", "a function of the output and the batch; by default the model's own loss")
    add_factory(parser, "inputs", "a function of a batch: the part that the model takes; by default all")
    parser.add_argument(
        "--budget",
        default="default",
        metavar="BUDGET",
        help="default: no more error than --op-list has; than another list has, by its name; error=0.01, at most this "
        "error; or bytes=0.8, at most this share of the bytes",
    )
    parser.add_argument("--of", choices=TARGETS, default=TARGETS[0], help="whose error; gradient")
    parser.add_argument(
        "--float8",
        nargs="?",
        const=recipe_of(True),
        choices=tuple(RECIPES),
        metavar="RECIPE",
        help=f"also choose matrix products that run in float8, by one of {', '.join(RECIPES)}; alone {recipe_of(True)}",
    )
    parser.add_argument(
        "--share",
        type=float,
        metavar="FRACTION",
        help="instead of --budget: at least this share of the operations of products runs in float8",
    )
    group(parser, CONVERSION).add_argument(
        "--fold", choices=tuple(LEVELS), default="exact", help="as for convert; exact"
    )
    parser.add_argument("--probes", type=int, default=8, metavar="N", help="random projections for each batch; 8")
    parser.add_argument("--held-out", type=int, default=1, metavar="N", help="batches to judge on; 1")
    add_file(group(parser, WRITTEN), "-o", "--output", help="write the op list here, in YAML")
    add_file(group(parser, WRITTEN), "--plot", help="draw bytes against error here, as SVG")
    add_file(parser, "--sensitivity", help="keep here what each batch gave, and go on from there")
    parser.set_defaults(run=_run_tune)


def _run_tune(options: Namespace) -> int:
    """Run ``tune``. Returns 0, also if there is nothing to gain: the list is written."""
    # what was given, before work that may take minutes
    budget = _budget(options.budget)
    for name in ("probes", "held_out"):
        if getattr(options, name) < 1:
            raise ModelSpecError(f"--{name.replace('_', '-')} is a number from 1 on, not {getattr(options, name)}.")
    try:
        check_share(options.share, budget, recipe_of(options.float8))
    except ValueError as error:
        raise ModelSpecError(f"{error}.") from error
    for path in (options.output, options.plot, options.sensitivity):
        if path is not None:
            check_writable(path)
    loss = load_function(options.loss, "a loss") if options.loss is not None else None
    inputs = load_function(options.inputs, "a function of a batch") if options.inputs is not None else None
    model, batches = given_model(options, options.model), load_batches(options.batches)
    for batch in batches[:1]:
        _arguments(model, batch, inputs)  # before work that may take minutes
    # measure, or go on from a file, and tune
    how: dict[str, Any] = {"dtype": options.dtype, "op_list": options.op_list or "default"}
    measured = None
    if options.sensitivity is not None:
        measured = _measured(options, model, batches, loss, inputs, how)
    tuned = tune(
        model,
        batches,
        loss,
        budget=budget,
        of=options.of,
        probes=options.probes,
        held_out=options.held_out,
        sensitivity=measured,
        float8=options.float8,
        share=options.share,
        fold=options.fold,
        inputs=inputs,
        **how,
    )
    # the list, the picture and what was found
    if options.output is not None:
        tuned.save(options.output)
    if options.plot is not None:
        tuned.plot(options.plot)
    if options.json:
        print_json(_plain(tuned))
    else:
        print(tuned.report())
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
    recipe = options.float8 or (known.float8 if known is not None else "")
    if known is not None:
        ours = (options.of, amp_model.plan.low, options.probes, recipe)
        if (known.of, known.dtype, known.probes, known.float8) != ours:
            raise ModelSpecError(
                f"{file} was measured for the {known.of} in {known.dtype} by {known.probes} probes"
                f"{_and_float8(known.float8)}, and this command asks for the {ours[0]} in {ours[1]} by {ours[2]}"
                f"{_and_float8(recipe)}: measure into another file."
            )
        if not _is_of(known, amp_model.plan):
            raise ModelSpecError(f"{file} was measured for another model: measure into another file.")
    measuring = Measuring(amp_model, loss_fn, options.of, options.probes, inputs, known, recipe)
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


def _and_float8(recipe: str) -> str:
    return f" and float8 {recipe}" if recipe else ""


def _is_of(known: Sensitivity, plan: Plan) -> bool:
    """True if most of what was measured is in the plan; graphs for other calls may differ from it."""
    keys = {(node.name, node.op, node.module) for node in plan.nodes}
    replaced = {name for one in plan.recomposed for name in one.replaced}
    matches = [effect.key in keys or effect.name in replaced for effect in known.effects if effect.name != OUTPUT]
    return 2 * sum(matches) > len(matches)


def _known(file: Path) -> Sensitivity | None:
    try:
        return Sensitivity.load(file) if file.exists() else None
    except SensitivityError as error:
        raise ModelSpecError(str(error)) from error


def _plain(tuned: Tuned) -> dict[str, Any]:
    """The result as data; errors that are not finite are null."""
    points = {"start": tuned.start, "tuned": tuned.point, "front": list(tuned.front)}
    rules = {"op_list": tuned.text(), "gains": tuned.gains, "sensitivity": str(tuned.sensitivity)}
    return {"budget": vars(tuned.budget), **points, **rules}
