"""The commands ``autocastfx compare``, ``check`` and ``bisect``: their arguments, and their runs to an exit code."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autocastfx.capture.call import device_of
from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.cli.conversion_options import add_conversion_options, conversion_arguments
from autocastfx.cli.model_options import converted, given_model
from autocastfx.cli.model_spec import load_function, load_inputs
from autocastfx.dtypes import chosen_dtype, dtype_name
from autocastfx.errors import BisectError, EvaluationsError, ModelSpecError
from autocastfx.files import check_writable
from autocastfx.numerics.bisect import METRICS, OutputError, bisect
from autocastfx.numerics.check import check
from autocastfx.numerics.compare import compare
from autocastfx.numerics.find_overflow import find_overflow
from autocastfx.policy.op_list import load_op_list
from autocastfx.report.dump import dump

__all__ = ["add_to"]

_OF_A_SEARCH = ("model", "inputs", "weights", "mode", "metric", "seed")  # arguments that identify a search


def add_to(add: Callable[..., argparse.ArgumentParser], parents: Sequence[argparse.ArgumentParser], model: str) -> None:
    """Add the commands with ``add``, the subcommands' ``add_parser``; ``model`` is the help text of MODEL."""
    seeded = argparse.ArgumentParser(add_help=False)
    seeded.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers of each run; 0")

    parser = add(
        "compare", parents=[*parents, seeded], help="run a model in 16 bits and in float32, and compare each value"
    )
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--gradients", action="store_true", help="compare gradients as well")
    parser.add_argument(
        "--loss",
        metavar="LOSS",
        help="package.module:factory, giving a function of the output, for gradients; by default the output's sum",
    )
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="a loss scale, for gradients; 1")
    parser.add_argument("--most", type=int, default=20, metavar="N", help="show as many; 20")
    parser.add_argument("--in-order", action="store_true", help="show the first ones, not the worst")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the page of dump, with these numbers")
    add_conversion_options(parser)
    parser.set_defaults(run=_compare)

    parser = add("check", parents=parents, help="run a model beside its conversion, and say what differs")
    parser.add_argument("model", metavar="MODEL", help=model)
    add_conversion_options(parser)
    parser.set_defaults(run=_check_model)

    parser = add(
        "bisect", parents=[*parents, seeded], help="find the ops that have to run in float32, and write a list"
    )
    parser.add_argument("model", metavar="MODEL", help=model)
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
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="the op list, in YAML")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep evaluations here, and go on from them")
    parser.set_defaults(run=_bisect)


def _compare(options: argparse.Namespace) -> int:
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
        found = compare(None, amp_model, *args, **how, **kwargs)
        overflow = None if options.json or found.first_non_finite is None else find_overflow(amp_model, *args, **kwargs)
    if options.page is not None:
        dump(amp_model, options.page, "html", comparison=found)
    if options.json:
        print(found.to_json())
        return int(not found.is_finite)
    print(found.table(options.most, in_order=options.in_order))
    if options.gradients:
        print("\ngradients", found.table(options.most, in_order=options.in_order, gradients=True), sep="\n")
    if overflow is not None:
        print(f"\n{overflow}")
    return int(not found.is_finite)


def _check_model(options: argparse.Namespace) -> int:
    """Run ``check``. Returns 1 if the conversion does something else than the model, or is less exact than allowed."""
    _check(options, "check runs the model")
    model = given_model(options, options.model)
    place = device_of(model)
    how = conversion_arguments(options, place)
    batch = load_inputs(options.inputs, place)
    found = check(model, [batch], dtype=options.dtype, op_list=options.op_list or "default", **how)
    print(found.to_json() if options.json else found)
    return int(not found.ok)


def _bisect(options: argparse.Namespace) -> int:
    """Run ``bisect``. Returns 1 if the metric does not hold even in float32."""
    if not math.isfinite(options.tolerance):
        raise ModelSpecError(f"--tolerance is a finite number, not {options.tolerance}.")
    if options.tolerance < 0 and options.metric in METRICS:
        raise ModelSpecError(f"--tolerance of the metric {options.metric} is from 0 on, not {options.tolerance}.")
    _check(options, "bisect runs the model")
    own = load_function(options.metric, "a metric") if options.metric not in METRICS else None
    model = given_model(options, options.model)
    place = device_of(model)
    low = chosen_dtype(options.dtype, place)
    lists = load_op_list(options.op_list or "default", default=dtype_name(low))
    args, kwargs = load_inputs(options.inputs, place)
    metric = own or OutputError(model, args, kwargs, options.metric, options.seed)
    try:
        with _shown() as show:
            found = bisect(
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
    found.op_list.save(options.output)
    if options.json:
        places = [vars(place) for place in found.places]
        numbers = {name: getattr(found, name) for name in ("metric", "low", "float32", "evaluations")}
        plain = {name: one if math.isfinite(one) else str(one) for name, one in numbers.items()}
        print(json.dumps({"places": places, **plain}, indent=1))
        return 0
    print(found)
    print(f"{options.output}: give it after the others, as in --op-list default {options.output}")
    return 0


def _check(options: argparse.Namespace, why: str) -> None:
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
