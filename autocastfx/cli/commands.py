"""The commands of ``autocastfx``, each from parsed arguments to an exit code."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from autocastfx.capture.call import device_of
from autocastfx.cli.conversion_options import given_options
from autocastfx.cli.doctor import examine
from autocastfx.cli.list_check import rule_uses
from autocastfx.cli.model_options import converted, given_model
from autocastfx.cli.model_spec import load_inputs
from autocastfx.cli.terminal import for_output
from autocastfx.dtypes import chosen_dtype, dtype_name
from autocastfx.errors import ModelSpecError, PlanError
from autocastfx.files import check_writable, read_whole, replacing
from autocastfx.plan.plan import Plan, select
from autocastfx.plan.plan_diff import PlanDiff
from autocastfx.plan.plan_diff import diff as diff_plans
from autocastfx.policy.op_list import load_op_list, preset_path, preset_title, presets
from autocastfx.report.dump import dump as dump_model
from autocastfx.report.dump import dump_text
from autocastfx.report.explain import explain as explain_node
from autocastfx.report.text import TextOptions

__all__ = [
    "check_list",
    "convert_model",
    "diff",
    "diff_lists",
    "doctor",
    "dump",
    "explain",
    "list_path",
    "list_presets",
    "print_json",
    "show_list",
]

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
            text = dump_text(amp_model, TextOptions(**for_output(options.width, sys.stdout), **chosen))
    except ValueError as error:
        raise ModelSpecError(f"{error}.") from error
    if options.output is None:
        sys.stdout.write(text)
    return 0


def explain(options: Namespace) -> int:
    """Run ``explain MODEL WHAT …``."""
    amp_model = converted(options, options.op_list or "default")
    try:
        found = {what: (select(amp_model.plan, what), explain_node(amp_model, what)) for what in options.what}
    except KeyError as error:
        raise ModelSpecError(f"{error.args[0]}.") from error
    if options.json:
        return print_json([{"what": what, "nodes": nodes, "text": text} for what, (nodes, text) in found.items()])
    print("\n".join(text for _, text in found.values()), end="")
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
    if options.json:
        print_json(_of_diff(found))
    else:
        print(found)
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


def doctor(options: Namespace) -> int:
    """Run ``doctor``."""
    found = examine()
    if options.json:
        return print_json(found)
    print(found)
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
    if options.json:
        print_json(list(uses))
    else:
        print("\n".join(map(str, uses)) or f"{' '.join(options.list)}: no rules but those that come with this package")
    return int(any(use.unmatched for use in uses))


def list_path(options: Namespace) -> int:
    """Run ``lists path NAME``."""
    print(preset_path(options.name))
    return 0


def diff_lists(options: Namespace) -> int:
    """Run ``lists diff BEFORE AFTER``. Returns 1 if the lists differ."""
    before, after = (load_op_list(name, default=options.dtype or _LISTED) for name in (options.before, options.after))
    changes = before.diff(after)
    if options.json:
        print_json(list(changes))
    else:
        print("\n".join(map(str, changes)) or "both say the same")
    return int(bool(changes))


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(read_whole(path))
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise PlanError(f"{path} is no plan that dump --format json wrote: {error}.") from error


def _of_diff(found: PlanDiff) -> dict[str, Any]:
    changed = [{"name": d.name, "moved": d.moved, "before": d.before, "after": d.after} for d in found.changed]
    return {"changed": changed, "removed": found.removed, "added": found.added}


def _of_rule(rule: Any) -> dict[str, Any]:
    wanted = getattr(rule, "wanted", str(rule.category))
    source = str(rule.source) if rule.source else ""
    return {"subject": rule.subject, "category": wanted, "reason": rule.reason, "source": source}


def print_json(value: Any) -> int:
    """Print ``value`` as JSON text, and return exit code 0."""
    print(json.dumps(value, indent=1, ensure_ascii=False, default=_plain))
    return 0


def _plain(value: Any) -> Any:
    """Turn dataclasses, which ``json`` cannot write, into dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
