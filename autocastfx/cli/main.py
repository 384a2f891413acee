"""The command line ``autocastfx``: its arguments, its messages and its exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from importlib.metadata import version

from autocastfx.cli import commands, numerics
from autocastfx.cli.before_import import interrupted, raise_when_interrupted
from autocastfx.cli.commands import add_run_to
from autocastfx.cli.doctor import doctor as run_doctor
from autocastfx.cli.model import add_conversion_options, converted
from autocastfx.cli.parser import CONVERSION, MODEL, WRITTEN, SuggestingParser, add_file, group, with_examples
from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import (
    AutocastFXError,
    EvaluationsError,
    GpuError,
    ModelSpecError,
    NodeError,
    OpListError,
    PlanError,
)
from autocastfx.report.formats import FORMATS
from autocastfx.report.lint.lint import lint
from autocastfx.report.lint.roofline import find_gpu, gpus


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by arguments without the program's name; by default those of this process.

    Returns:
        The exit code: 0 good; 1 the answer is no (an op list is wrong, plans or lists differ, values overflow); 2 the
        arguments cannot be used; 3 the conversion fails; 130 interrupted; 141 the reader closed the output.

    Raises:
        SystemExit: with code 2 for unknown arguments, with 0 after ``--help`` and ``--version``.
    """
    try:
        raise_when_interrupted()
        options = parser_of_all().parse_args(argv)
    except KeyboardInterrupt:
        return interrupted()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters such as arrows must not end a command
    try:
        with _current_directory_importable(), _warnings_in_one_line():
            outcome: int | Callable[[], int] = options.run(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        else:
            print(f"autocastfx: error: {_brief(error)}", file=sys.stderr)
        return _code(error)
    return outcome() if callable(outcome) else outcome  # a script: its errors and warnings are shown as without us


def _run_lint(options: argparse.Namespace) -> int:
    if not options.inputs:
        raise ModelSpecError("lint reads sizes: give --inputs.")
    try:
        find_gpu(options.gpu)  # before work that may take minutes
        findings = lint(converted(options, options.op_list or "default", device="cuda"), options.gpu)
    except GpuError as error:
        raise ModelSpecError(str(error)) from error
    print(findings.to_json() if options.json else findings)
    return 0


_CODES = (
    "exit codes: 0 good; 1 the answer is no (a list is wrong, plans or lists differ, values overflow); 2 usage; 3 the "
    "conversion fails"
)
_MODEL = (
    "package.module:name of an nn.Module, or of what gives one when it is called, with literal arguments if need be: "
    "'net:build(layers=2)'; or, with --trust, a .pt or .pth file of one"
)
_INPUTS = (
    "the inputs of one call: package.module:factory giving a tuple (by position) or a dict (by keyword), or for "
    "each its dtype and sizes: 'float32[8,3,32,32]', 'mask=bool[8,128]', 'ids=int64[8,128]<1000' (random below 1000, "
    "else zeros)"
)
_MOST_LINES = 3
_NET = "net:Net --inputs 'float32[8,3,32,32]'"
# A command line for each command, without the program's name.
_EXAMPLES = {
    "dump": f"dump {_NET} --dtype bfloat16 -o net.html",
    "explain": f"explain {_NET} softmax",
    "diff": f"diff {_NET} --op-list default --op-list default mine.yaml",
    "compare": f"compare {_NET} --gradients",
    "check": f"check {_NET} --dtype float16",
    "time": f"time {_NET} --dtype bfloat16",
    "bisect": f"bisect {_NET} --tolerance 0.01 -o list.yaml",
    "tune": "tune net:Net --batches net:batches --budget error=0.01 -o tuned.yaml",
    "convert": f"convert {_NET} -o net.pt",
    "lint": f"lint {_NET} --gpu H100",
    "run": "run --dtype bfloat16 train.py --epochs 3",
    "doctor": "doctor --json",
    "lists": "lists",
}
_LIST_EXAMPLES = {
    "show": "show bfloat16",
    "check": f"check mine.yaml --model {_NET}",
    "path": "path bfloat16",
    "diff": "diff bfloat16 mine.yaml",
}


def _code(error: Exception) -> int:
    if isinstance(error, OpListError):
        return 2 if error.source is None else 1  # 2: the list was not found; 1: it is wrong
    return 2 if isinstance(error, (EvaluationsError, ModelSpecError, PlanError, OSError)) else 3


def _brief(error: Exception) -> str:
    """Return the first lines of an error's message, with its class if it is not one of our errors or an OSError."""
    expected = isinstance(error, (AutocastFXError, OSError))
    if isinstance(error, NodeError):
        return str(error)  # the lines after the first are an op list to copy
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = "\n".join(lines[:_MOST_LINES]) if expected else f"{type(error).__name__}: {' '.join(lines[:1])}"
    return f"{said} (--traceback shows more)" if len(lines) > _MOST_LINES or not expected else said


@contextlib.contextmanager
def _current_directory_importable() -> Generator[None]:
    """Put the current directory on ``sys.path``, as ``python -m`` does and an installed command does not."""
    here, before = os.getcwd(), list(sys.path)
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _warnings_in_one_line() -> Generator[None]:
    def show(message: Warning | str, *_: object) -> None:
        print(f"autocastfx: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = SuggestingParser(
        prog="autocastfx", description="Mixed precision for PyTorch as a graph rewrite.", epilog=_CODES
    )
    parser.add_argument("--version", action="version", version=f"autocastfx {version('autocastfx')}")
    commands_of = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = with_examples(commands_of.add_parser, _EXAMPLES)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    data = argparse.ArgumentParser(add_help=False, parents=[common])
    group(data, WRITTEN).add_argument("--json", action="store_true", help="give data instead of text")
    dtype = argparse.ArgumentParser(add_help=False)
    group(dtype, CONVERSION).add_argument(
        "--dtype",
        choices=tuple(map(dtype_name, LOW_DTYPES)),
        help="the 16-bit dtype; default: bfloat16 for a model on a CPU, else float16",
    )
    given = argparse.ArgumentParser(add_help=False, parents=[dtype])
    how = group(given, MODEL)
    how.add_argument("--mode", choices=("train", "eval"), help="the factory's by default")
    add_file(how, "--weights", help="a state_dict for the model; nothing in it runs")
    how.add_argument("--trust", action="store_true", help="read a MODEL that is a file, which runs what it says")
    inputs = argparse.ArgumentParser(add_help=False, parents=[given])
    group(inputs, MODEL).add_argument("--inputs", nargs="+", action="extend", default=[], metavar="INPUT", help=_INPUTS)
    lists = argparse.ArgumentParser(add_help=False)
    group(lists, CONVERSION).add_argument(
        "--op-list", nargs="+", action="extend", metavar="LIST", help="presets or YAML files, of which the later win"
    )

    model = argparse.ArgumentParser(add_help=False)
    group(model, MODEL).add_argument("model", metavar="MODEL", help=_MODEL)

    of_a_model = [common, inputs, lists, model]
    dump = add("dump", parents=of_a_model, help="show what was decided for each node of a model, and why")
    written = group(dump, WRITTEN)
    written.add_argument("--format", choices=FORMATS, help="default: by the suffix of the output's name, else text")
    add_file(written, "-o", "--output", help="write here, not to standard output")
    written.add_argument("--full", action="store_true", help="a line for each node, parameters and casts too")
    written.add_argument(
        "--only", metavar="WHAT", help="show low, float32, captured, casts, a category such as deny, or an op alone"
    )
    written.add_argument("--module", metavar="PATH", help="show what is inside a module alone; a path or a pattern")
    written.add_argument("--summary", action="store_true", help="count by op and by module, and list no nodes")
    written.add_argument(
        "--width", type=int, metavar="N", help="of lines; by default the terminal's; 0, and in files: no limit"
    )
    said = "mark on the page what this file of dump --format json decides otherwise"
    add_file(written, "--against", metavar="PLAN", help=said)
    add_conversion_options(dump)
    dump.set_defaults(run=commands.dump)

    with_data = [data, inputs, lists, model]
    explain = add("explain", parents=with_data, help="say why nodes run as they do, and what would change it")
    group(explain, MODEL).add_argument(
        "what", nargs="+", metavar="WHAT", help="a node, an op, a module, or an op inside a module"
    )
    add_conversion_options(explain)
    explain.set_defaults(run=commands.explain)

    diff = add("diff", parents=[data, inputs], help="compare two plans: of a model with two op lists, or of two files")
    group(diff, MODEL).add_argument(
        "what", nargs="+", metavar="MODEL or PLAN", help=f"{_MODEL}; or two files of dump --format json"
    )
    group(diff, CONVERSION).add_argument(
        "--op-list", nargs="+", action="append", default=[], metavar="LIST", help="given twice: before, and after"
    )
    add_conversion_options(diff)
    diff.set_defaults(run=commands.diff)

    numerics.add_to(add, [data, inputs, lists], model)
    numerics.add_tune_to(add, [data, given, lists, model])
    convert = add("convert", parents=of_a_model, help="convert a model and save the result")
    add_file(group(convert, WRITTEN), "-o", "--output", required=True, help="what torch.save writes")
    add_conversion_options(convert)
    convert.set_defaults(run=commands.convert_model)

    lint_it = add("lint", parents=with_data, help="sizes that tensor cores would pad, and where time would go on a GPU")
    names = ", ".join(gpu.name for gpu in gpus())
    group(lint_it, MODEL).add_argument(
        "--gpu", default="A100", metavar="GPU", help=f"{names}; A100 by default. It need not be here"
    )
    lint_it.set_defaults(run=_run_lint)
    add_run_to(add, common)
    doctor = add("doctor", parents=[data], help="versions, devices, how fast 16 bits are, and what cannot run in them")
    doctor.set_defaults(run=run_doctor)
    _add_lists(add("lists", help="look at op lists; alone, names the presets"), data, common, dtype, inputs)
    return parser


def _add_lists(
    parser: argparse.ArgumentParser,
    data: argparse.ArgumentParser,
    common: argparse.ArgumentParser,
    dtype: argparse.ArgumentParser,
    inputs: argparse.ArgumentParser,
) -> None:
    parser.set_defaults(run=commands.list_presets, traceback=False)
    add = with_examples(parser.add_subparsers(title="commands", metavar="COMMAND").add_parser, _LIST_EXAMPLES)
    name = "a preset's name or the path of a YAML file"

    show = add("show", parents=[data, dtype], help="write a list out, with all that it extends")
    show.add_argument("list", metavar="LIST", help=name)
    show.set_defaults(run=commands.show_list)

    check = add("check", parents=[data, inputs], help="say whether lists are right, and what it does in a model")
    check.add_argument("list", nargs="+", metavar="LIST", help=f"{name}; of several the later win")
    check.add_argument("--model", metavar="MODEL", help=f"{_MODEL}; asks for --inputs")
    check.set_defaults(run=commands.check_list)

    path = add("path", parents=[common], help="where the file of a preset is")
    path.add_argument("name", metavar="NAME", help="of a preset")
    path.set_defaults(run=commands.list_path)

    diff = add("diff", parents=[data, dtype], help="what a second list says otherwise")
    diff.add_argument("before", metavar="BEFORE", help=name)
    diff.add_argument("after", metavar="AFTER", help=name)
    diff.set_defaults(run=commands.diff_lists)
