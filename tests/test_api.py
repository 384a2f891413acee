"""The names that ``autocastfx`` has: few, imported when asked for."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch

import autocastfx
from autocastfx import testing

SOURCE = Path(autocastfx.__file__).read_text(encoding="utf-8")


def test_there_are_about_35_names() -> None:
    assert len(autocastfx.__all__) <= 41
    assert sorted(autocastfx.__all__) == sorted({*autocastfx._HOME_OF, "__version__"})
    assert {*autocastfx.__all__} <= {*dir(autocastfx)}


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    (block,) = (node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    seen = {
        alias.name: (node.module or "").removeprefix("autocastfx.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == autocastfx._HOME_OF


@pytest.mark.parametrize("name", sorted(autocastfx._HOME_OF))
def test_a_name_is_that_of_its_module(name: str) -> None:
    assert getattr(autocastfx, name) is getattr(import_module(f"autocastfx.{autocastfx._HOME_OF[name]}"), name)


# What public names return, by the modules that have it: the reference shows it under its full name.
RETURNED = {
    "graph.magnitude": "Exponents Margin Shares",
    "numerics.bisect": "Bisection OpInModule",
    "numerics.check": "Check CheckedValue",
    "numerics.find_overflow": "InputRange Overflow",
    "numerics.gradient_histogram": "GradientHistogram",
    "numerics.logprob_gap": "LogprobGap",
    "numerics.plan_search": "Point",
    "numerics.tune": "Tuned",
    "numerics.watch": "SkippedStep Watch WatchedNode",
    "plan.plan": "Cause Decision Forced Placement PlannedCast PlannedCopy PlannedNode Precision Recomposed Why",
    "plan.plan_diff": "Difference PlanDiff",
    "plan.ranges": "Range",
    "plan.sensitivity": "Effect",
    "policy.rule": "Category Rule Runs Selector",
    "policy.write_list": "Change",
    "report.comparison": "Beginning ComparedNode ComparedParameter ComparedVariant Deviation",
    "report.compiled_graph": "CompiledGraph",
    "report.dump": "Page",
    "report.lint.lint": "Lint OpEstimate",
    "report.lint.odd_size": "OddSize",
    "report.lint.roofline": "Total",
    "report.timing": "TimedSide Timing",
}


def test_the_reference_has_each_public_name_once_and_convert_first() -> None:
    docs = Path(autocastfx.__file__).parents[1] / "docs"
    sections = re.findall(r"^(api/\w[\w-]*)$", (docs / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(f"api/{page.stem}" for page in (docs / "api").glob("*.md"))
    text = "".join((docs / f"{section}.md").read_text(encoding="utf-8") for section in sections)
    shown = re.findall(r"^\.\. auto(?:class|data|exception|function):: autocastfx\.([\w.]+)$", text, re.MULTILINE)
    assert shown[0] == "convert"
    assert len(shown) == len({*shown})
    optional = {name for name in shown if name.startswith("integrations.")}  # their packages may not be there
    public = {name for name in autocastfx.__all__ if not name.startswith("_")}
    errors = {name for name, value in vars(autocastfx.errors).items() if isinstance(value, type)}
    own = {name for name in errors if getattr(autocastfx.errors, name).__module__ == "autocastfx.errors"}
    public |= {f"errors.{name}" for name in (*own, "TextPlace") if not name.startswith("_")}
    public |= {f"testing.{name}" for name in testing.__all__}
    public |= {f"{home}.{name}" for home, names in RETURNED.items() for name in names.split()}
    assert {*shown} - optional == public


def test_another_name_is_unknown() -> None:
    with pytest.raises(AttributeError, match="module 'autocastfx' has no attribute 'convrt'"):
        autocastfx.convrt  # type: ignore[attr-defined]  # noqa: B018


LOADED = """
import sys, torch
before = {*sys.modules}
import autocastfx
print(*({*sys.modules} - before))
print(torch.ops.autocastfx.rms_norm.default, torch.ops.autocastfx.data.default)
"""


def test_importing_the_package_loads_the_operators_of_saved_graphs_and_little_else() -> None:
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded, operators = ran.stdout.splitlines()
    own = [name for name in loaded.split() if name.startswith("autocastfx.")]
    assert len(own) <= 35, own
    assert not [
        name for name in own if name.startswith(("autocastfx.passes", "autocastfx.numerics", "autocastfx.report"))
    ]
    assert operators == "autocastfx.rms_norm.default autocastfx.data.default"


def test_no_module_makes_a_tensor_as_it_is_imported() -> None:
    """It would be on the default device that a program has set meanwhile, or one of its inference mode."""
    modules = []
    for part in pkgutil.walk_packages(autocastfx.__path__, "autocastfx."):
        with suppress(ImportError):  # of packages that are not there, as triton
            modules.append(import_module(part.name))
    kept = [f"{m.__name__}.{name}" for m in modules for name, one in vars(m).items() if torch.is_tensor(one)]
    assert kept == []


def test_every_error_is_one_of_the_package_and_one_of_python() -> None:
    with pytest.raises(autocastfx.errors.AutocastFXError, match=r"^dtype is torch\.float16 or torch\.bfloat16"):
        autocastfx.convert(import_module("torch").nn.Linear(2, 2), dtype="float8")
    with pytest.raises(autocastfx.errors.UnknownNameError) as caught:
        autocastfx.Ranges(())["exp"]
    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == "no value 'exp' was measured"
