"""The commands of ``autocastfx``, each from parsed arguments to an exit code."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autocastfx.capture.call import conversion_is_off, device_of
from autocastfx.cli.model import converted, given_model, given_options, load_inputs
from autocastfx.cli.parser import add_file
from autocastfx.conversion import convert
from autocastfx.dtypes import LOW_DTYPES, chosen_dtype, dtype_name
from autocastfx.errors import ModelSpecError, PlanError, UnmatchedRuleWarning, listed
from autocastfx.files import check_writable, plain_data, read_whole, replacing, write_whole
from autocastfx.graph.node import path_and_around
from autocastfx.integrations.backend import UNCAPTURED, CompileBackend
from autocastfx.integrations.script import ScriptRun
from autocastfx.plan.plan import Plan, PlannedNode
from autocastfx.plan.plan_diff import diff as diff_plans
from autocastfx.policy.float8 import Float8Settings
from autocastfx.policy.kernel_facts import LEVELS
from autocastfx.policy.match import by_place
from autocastfx.policy.op_list import OpList, load_op_list, preset_path, preset_title, presets
from autocastfx.policy.rule import Rule
from autocastfx.report.columns import LEAST_WIDTH
from autocastfx.report.dump import dump as dump_model
from autocastfx.report.dump import dump_text
from autocastfx.report.explain import explain as explain_node
from autocastfx.report.explain import explained_nodes
from autocastfx.report.text import TextOptions

# The width and the colours of what a command prints.


def for_output(width: int | None) -> tuple[int | None, bool]:
    """Return the width of what is printed, and whether to colour it.

    Args:
        width: that was asked for; 0 for no limit, None for the terminal's. Where there is none nothing is shortened.
            Colours are for terminals alone, not for those with ``TERM=dumb`` or ``NO_COLOR``.
    """
    is_terminal = sys.stdout.isatty()
    if width is None:
        width = max(shutil.get_terminal_size().columns, LEAST_WIDTH) if is_terminal else None
    colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return width or None, colour


# Check the rules of an op list against a model: list the nodes that each decides, and rules that match none.

_MOST = 6


@dataclass(frozen=True)
class RuleUse:
    """A rule and the nodes that it decides.

    Attributes:
        source: the rule's place.
        subject: the ops or modules that it covers.
        category: its category.
        nodes: names of the nodes that it decides, in all captured variants.
        unmatched: a sentence that it matches no node; empty if it matches some, decided by it or by other rules.
    """

    source: str
    subject: str
    category: str
    nodes: tuple[str, ...]
    unmatched: str = ""

    def __str__(self) -> str:
        if self.unmatched:
            return self.unmatched
        decides = f"decides {len(self.nodes)}: {listed(self.nodes, _MOST)}"
        what = decides if self.nodes else "matches only nodes that something else decides"
        return f"{self.source}: {self.subject} ({self.category}) {what}"


def rule_uses(
    op_list: OpList, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[RuleUse, ...]:
    """Convert ``model`` and report on each of the list's own rules, without shipped rules and other device types.

    Raises:
        AutocastFXError: the model cannot be converted with this list.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnmatchedRuleWarning)
        plans = [v.plan for v in convert(model, args, kwargs, dtype=dtype, op_list=op_list).variants]
    for other in (w for w in caught if not issubclass(w.category, UnmatchedRuleWarning)):
        warnings.warn(other.message, other.category, stacklevel=2)
    said = [str(w.message) for w in caught if issubclass(w.category, UnmatchedRuleWarning)]
    own = [r for r in op_list.every_rule() if not r.shipped and r.device in ("", plans[0].device)]
    for text in (text for text in said if not any(text.startswith(f"{rule.source}: ") for rule in own)):
        warnings.warn(text, UnmatchedRuleWarning, stacklevel=2)
    uses: list[RuleUse] = []
    for rule in sorted(own, key=by_place):
        nodes = tuple(dict.fromkeys(n.name for p in plans for n in p.nodes if _decides(rule, n)))
        unmatched = "" if nodes else next((text for text in said if text.startswith(f"{rule.source}: ")), "")
        uses.append(RuleUse(str(rule.source), rule.subject, rule.wanted, nodes, unmatched))
    return tuple(uses)


def _decides(rule: Rule[Any], node: PlannedNode) -> bool:
    """True if a node has its category by this rule, or of a rule for float8, products or none."""
    if not isinstance(rule.effect, Float8Settings):
        return node.decision.source == rule.source
    is_inside = not rule.path or any(map(rule.covers, path_and_around(node.module)))
    return node.float8 is not None and is_inside and (not rule.ops or node.op in rule.ops)


# ``autocastfx run``: run a script whose models are converted at their first calls.


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
    parser.add_argument("--fold", choices=tuple(LEVELS), default="exact", help="as for convert; exact")
    parser.add_argument("--inner", default="eager", help="the backend of torch.compile that compiles the result")
    parser.add_argument(
        "--uncaptured", choices=UNCAPTURED, default="autocast", help="how code runs that is not captured; autocast"
    )
    add_file(parser, "--report", help="write what became of each model, as JSON")
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the path of the script")
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


_LISTED = "float16"  # the list that "default" stands for where neither --dtype nor a model says


def dump(options: Namespace) -> int:
    """Run ``dump MODEL``: write a model in one of the formats, to standard output or a file."""
    if options.output is not None:
        check_writable(options.output)
    against = _read_plan(options.against) if options.against is not None else None
    amp_model = converted(options, options.op_list or "default")
    chosen = {name: getattr(options, name) for name in ("full", "only", "module", "summary")}
    try:
        if options.output is not None or options.format not in (None, "text") or against is not None:
            text = dump_model(
                amp_model, options.output, options.format, width=options.width or None, against=against, **chosen
            )
        else:
            width, colour = for_output(options.width)
            text = dump_text(amp_model, TextOptions(width=width, colour=colour, **chosen))
    except ValueError as error:
        raise ModelSpecError(f"{error}.") from error
    if options.output is None:
        sys.stdout.write(text)
    return 0


def explain(options: Namespace) -> int:
    """Run ``explain MODEL WHAT …``."""
    amp_model = converted(options, options.op_list or "default")
    try:
        answers = {
            what: (explained_nodes(amp_model.plan, what), explain_node(amp_model, what)) for what in options.what
        }
    except KeyError as error:
        raise ModelSpecError(f"{error.args[0]}.") from error
    if options.json:
        return print_json([{"what": what, "nodes": nodes, "text": text} for what, (nodes, text) in answers.items()])
    print("\n".join(text for _, text in answers.values()), end="")
    return 0


def diff(options: Namespace) -> int:
    """Run ``diff MODEL --op-list A --op-list B``, or ``diff A.json B.json``. Returns 1 if the plans differ."""
    if len(options.what) == 2 and not options.op_list:
        if options.inputs or options.weights:
            raise ModelSpecError("two plan files are compared as they are: leave out --inputs and --weights.")
        if given := given_options(options):
            raise ModelSpecError(f"two plan files are compared as they are: leave out {', '.join(given)}.")
        before, after = (_read_plan(Path(file)) for file in options.what)
    elif len(options.what) == 1 and len(options.op_list) == 2:
        model = given_model(options, options.what[0])
        before, after = (converted(options, op_list, model).plan for op_list in options.op_list)
    else:
        raise ModelSpecError("diff takes MODEL with --op-list A --op-list B, or two plan files of dump --format json.")
    found = diff_plans(before, after)
    changed = [{"name": d.name, "moved": d.moved, "before": d.before, "after": d.after} for d in found.changed]
    give(options, {"changed": changed, "removed": found.removed, "added": found.added}, str(found))
    return int(bool(found))


def convert_model(options: Namespace) -> int:
    """Run ``convert MODEL --inputs … -o FILE``."""
    if not options.inputs:
        raise ModelSpecError("convert saves captured graphs: give --inputs.")
    check_writable(options.output)
    amp_model = converted(options, options.op_list or "default")
    with replacing(options.output) as unfinished:
        torch.save(amp_model, unfinished)
    print(f"{options.output}: read it with torch.load(..., weights_only=False), which runs what a file says: trust it.")
    return 0


def list_presets(_options: Namespace) -> int:
    """Run ``lists``: the presets, a line each."""
    names = presets()
    width = max(map(len, names))
    print(f"{'default':<{width}}  the list of the dtype: float16 or bfloat16")
    print("\n".join(f"{name:<{width}}  {preset_title(name)}" for name in names))
    return 0


def show_list(options: Namespace) -> int:
    """Run ``lists show LIST``."""
    op_list = load_op_list(options.list, default=options.dtype or _LISTED)
    if options.json:
        return print_json([_of_rule(rule) for rule in op_list.every_rule()])
    sys.stdout.write(op_list.text())
    return 0


def check_list(options: Namespace) -> int:
    """Run ``lists check LIST …``. Returns 1 if a rule matches no node; a wrong list raises ``OpListError``."""
    if options.model is None:
        op_list = load_op_list(options.list, default=options.dtype or _LISTED)
        if options.inputs or options.weights:
            raise ModelSpecError("--inputs and --weights are for a model: give --model.")
        own = [rule for rule in op_list.every_rule() if not rule.shipped]
        if options.json:
            return print_json([_of_rule(rule) for rule in own])
        rest = len(op_list.every_rule()) - len(own)
        print(f"{' '.join(options.list)}: good; {len(own)} rules, and {rest} that come with this package")
        return 0
    if not options.inputs:
        raise ModelSpecError("rules are matched against a captured model: give --inputs.")
    model = given_model(options, options.model)
    place = device_of(model)
    dtype = chosen_dtype(options.dtype, place)
    op_list = load_op_list(options.list, default=dtype_name(dtype))
    uses = rule_uses(op_list, model, *load_inputs(options.inputs, place), dtype)
    none = f"{' '.join(options.list)}: no rules but those that come with this package"
    give(options, uses, "\n".join(map(str, uses)) or none)
    return int(any(use.unmatched for use in uses))


def list_path(options: Namespace) -> int:
    """Run ``lists path NAME``."""
    print(preset_path(options.name))
    return 0


def diff_lists(options: Namespace) -> int:
    """Run ``lists diff BEFORE AFTER``. Returns 1 if the lists differ."""
    before, after = (load_op_list(name, default=options.dtype or _LISTED) for name in (options.before, options.after))
    changes = before.diff(after)
    give(options, changes, "\n".join(map(str, changes)) or "both say the same")
    return int(bool(changes))


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(read_whole(path))
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise PlanError(f"{path} is no plan that dump --format json wrote: {error}.") from error


def _of_rule(rule: Any) -> dict[str, Any]:
    source = str(rule.source) if rule.source else ""
    return {"subject": rule.subject, "category": rule.wanted, "reason": rule.reason, "source": source}


def give(options: Namespace, data: Any, text: str) -> None:
    """Print ``data`` if ``--json`` asks for it, else ``text``."""
    if options.json:
        print_json(data)
    else:
        print(text)


def print_json(value: Any) -> int:
    """Print ``value`` as JSON text, and return exit code 0."""
    print(json.dumps(plain_data(value), indent=1, ensure_ascii=False))
    return 0
