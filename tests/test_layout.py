"""Where modules lie, what they may import, and where their tests are: layers of the package, one way. ``python -m
tests.test_layout`` prints what breaks the rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autocastfx"
# From low to high. A part imports parts of lower layers alone; parts of one layer do not know each other.
LAYERS = (
    ("errors",),
    ("dtypes", "files"),
    ("graph",),
    ("policy", "training"),
    ("plan",),
    ("capture",),
    ("runtime",),
    ("passes", "report"),
    ("calibration",),
    ("options",),
    ("conversion", "testing"),
    ("numerics",),
    ("integrations",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {part: floor for floor, parts in enumerate(LAYERS) for part in parts}
ROOMS = ("analysis", "decide", "patterns", "torch_autocast")  # of passes: what passes ask, and they do not ask passes
SHARED = ("casts", "state")  # the interface of passes
RUNS_PASSES = ("pipeline",)
MOST_IN_ROOT, MOST_LINES = 9, 700
# Tests of no single module: other packages in use, models for many modules, and all kernels at once.
OF_MANY = (
    *(f"integrations/test_{name}.py" for name in ("peft", "torchao", "trainers_page")),
    "numerics/test_corpus.py",
    "runtime/kernels/test_compile.py",
)


def broken(package: Path) -> Iterator[str]:
    """What breaks a rule, a line each."""
    if len(root := sorted(package.glob("*.py"))) > MOST_IN_ROOT:
        yield f"{len(root)} modules in the root, at most {MOST_IN_ROOT}: {', '.join(path.name for path in root)}"
    arrows: nx.DiGraph[str] = nx.DiGraph()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).with_suffix("").parts
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MOST_LINES:
            yield f"{'.'.join(name)} has {lines} lines, at most {MOST_LINES}"
        if name[0] not in FLOOR:
            yield f"{name[0]} is in no layer"
            continue
        for line, imported in imports(text, package.name):
            arrows.add_edge(".".join(name), module_of(imported, package))
            if not may_import(name, imported):
                yield f"{'.'.join(name)}:{line} imports {'.'.join(imported)}"
    for circle in nx.simple_cycles(arrows):
        yield f"a circle of imports: {' → '.join(sorted(circle))}"


def without_mirror(package: Path, tests: Path, of_many: Collection[str] = ()) -> Iterator[str]:
    """Modules with code that no test file is named after, and test files that no module has the name of.

    Beside ``room/test_module.py``, or in its place, the files of ``room/module/`` test the parts of a module.
    """
    homes = dict[str, Path]()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).with_name(path.stem.strip("_"))
        homes |= {f"{name}": path, f"{name.parent / f'test_{name.name}'}": path}
    found = dict[Path, str]()
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests)
        home = homes.get(f"{name.with_suffix('')}") or homes.get(f"{name.parent}")
        if home is not None:
            found[home] = f"{name}"
        elif (package / name.parts[0]).is_dir() and name.as_posix() not in of_many:
            yield f"{name} is no test of a module, and in no folder of one"
    for path in sorted({*homes.values()} - found.keys()):
        has_code = any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(path.read_text("utf-8"))))
        if has_code and not path.stem.startswith("__"):
            yield f"{path.relative_to(package)} has no test of its name"


def module_of(imported: tuple[str, ...], package: Path) -> str:
    """The module that holds the name ``imported``, or is it."""
    is_module = package.joinpath(*imported).with_suffix(".py").is_file()
    return ".".join(imported if is_module else imported[:-1]) or "__init__"


def imports(text: str, package: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The names of the package that a module imports anywhere, deferred and for types alone too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # ruff forbids relative ones
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for first, *rest in (name.split(".") for name in names):
            if first == package:
                yield node.lineno, tuple(rest) or ("__init__",)


def may_import(name: tuple[str, ...], imported: tuple[str, ...]) -> bool:
    """Whether the module ``name`` may import ``imported``: a module, or a name in one."""
    part = imported[0] if imported[0] in FLOOR else "__init__"
    if part != name[0]:
        return FLOOR[part] < FLOOR[name[0]]
    if part != "passes" or name[1] in RUNS_PASSES:
        return True
    if name[1] in ROOMS:
        others = {"torch_autocast": SHARED, "decide": ("analysis", "state")}  # which hold passes, too
        return imported[1] in (name[1], *others.get(name[1], ()))
    return imported[1] in (*ROOMS, *SHARED)


def test_every_module_imports_lower_layers_alone() -> None:
    assert list(broken(PACKAGE)) == []


def test_tests_mirror_modules() -> None:
    assert list(without_mirror(PACKAGE, ROOT / "tests", OF_MANY)) == []
    assert all((ROOT / "tests" / name).is_file() for name in OF_MANY)


def test_what_is_no_mirror_is_said(tmp_path: Path) -> None:
    modules = ("files", "plan/__init__", "plan/plan", "plan/_cause", "plan/diff", "plan/data", "plan/rows/row")
    tests = ("other/test_x", "test_y", "plan/test_cause", "plan/plan/test_part", "plan/rows/test_row", "plan/test_part")
    for name in modules:
        (path := tmp_path / "pack" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1" if name == "plan/data" else "class A:\n    def f(self): pass")
    for name in tests:
        (path := tmp_path / "tests" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list(without_mirror(tmp_path / "pack", tmp_path / "tests")) == [
        "plan/test_part.py is no test of a module, and in no folder of one",
        "files.py has no test of its name",
        "plan/diff.py has no test of its name",
    ]
    assert "test_part" not in next(without_mirror(tmp_path / "pack", tmp_path / "tests", ["plan/test_part.py"]))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("graph/node.py", "import os\nfrom pack.plan.plan import Plan", "graph.node:2 imports plan.plan.Plan"),
        ("errors.py", "def f():\n    import pack.files", "errors:2 imports files"),
        ("runtime/variant.py", "if T:\n    from pack import convert", "runtime.variant:2 imports convert"),
        ("policy/rule.py", "from pack.training import optimizer", "policy.rule:1 imports training.optimizer"),
        ("passes/place.py", "from pack.passes.verify import verify", "passes.place:1 imports passes.verify.verify"),
        ("passes/analysis/cut.py", "from pack.passes.state import S", "passes.analysis.cut:1 imports passes.state.S"),
        ("passes/analysis/cut.py", "import pack.passes.decide.x", "passes.analysis.cut:1 imports passes.decide.x"),
        ("shelf.py", "", "shelf is in no layer"),
        ("graph/long.py", "\n" * 701, "graph.long has 701 lines, at most 700"),
    ],
)
def test_what_breaks_a_rule_is_said(file: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pack" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    assert list(broken(tmp_path / "pack")) == [said]


def test_a_tenth_module_in_the_root_is_said(tmp_path: Path) -> None:
    for name in ["errors", "files", *(f"m{i}" for i in range(8))]:
        (tmp_path / f"{name}.py").write_text("")
    assert "10 modules in the root, at most 9" in next(broken(tmp_path))


def test_a_circle_is_said(tmp_path: Path) -> None:
    (tmp_path / "pack/plan").mkdir(parents=True)
    (tmp_path / "pack/plan/plan.py").write_text("def f():\n    from pack.plan.diff import diff")
    (tmp_path / "pack/plan/diff.py").write_text("if TYPE_CHECKING:\n    from pack.plan import plan")
    assert list(broken(tmp_path / "pack")) == ["a circle of imports: plan.diff → plan.plan"]


def test_what_is_allowed(tmp_path: Path) -> None:
    allowed = {
        "passes/pipeline.py": "from pack.passes.place import place\nfrom pack.plan.plan import Plan",
        "passes/place.py": "import torch\nfrom pack.passes.state import S\nimport pack.passes.analysis.cut",
        "passes/analysis/cut.py": "from pack.passes.analysis.ports import Ports\nfrom pack.graph import node",
        "__init__.py": "from pack.conversion import convert",
        "numerics/bisect.py": "from pack.conversion import convert",
    }
    for file, text in allowed.items():
        (tmp_path / "pack" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / file).write_text(text)
    assert list(broken(tmp_path / "pack")) == []


def test_what_forces_a_decision_is_named_once() -> None:
    named = [
        name for path in PACKAGE.rglob("*.py") for name in re.findall('"(forced:[\\w-]+)"', path.read_text("utf-8"))
    ]
    assert len(named) > 10
    assert len(named) == len(set(named))


def test_what_takes_long_to_import_is_imported_by_who_needs_it() -> None:
    """torch's compiler, sympy and networkx take more than a second; who asks for help or scales a loss needs none."""
    code = "import sys, torch; before = {*sys.modules}; import autocastfx.cli.main; print(*({*sys.modules} - before))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert "autocastfx.errors" in ran.stdout.split()
    assert not {"torch._dynamo", "torch.export._trace", "sympy", "networkx"} & {*ran.stdout.split()}


TRACED = """
import os, sys
import torch
from torch import nn
import autocastfx
from tests.test_layout import FLOOR
package, entered, upwards = os.path.dirname(autocastfx.__file__) + os.sep, set(), set()
def floor(path):
    return FLOOR[path.removeprefix(package).split(os.sep)[0].removesuffix(".py")]
def note(frame, event, argument):
    code, caller = frame.f_code, frame.f_back
    if not code.co_filename.startswith(package):
        return
    entered.add(code.co_filename)
    name = getattr(code, "co_qualname", "<")  # Python 3.10 has none
    if "<" in name:  # what is handed down
        return
    while caller is not None and not caller.f_code.co_filename.startswith(package):
        caller = caller.f_back
    if caller is not None and floor(code.co_filename) > floor(caller.f_code.co_filename):
        upwards.add(name)
def trace(call, *given):
    entered.clear(); sys.settrace(note)
    try:
        result = call(*given)
    finally:
        sys.settrace(None)
    print(*sorted(name.removeprefix(package) for name in entered))
    return result
model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), torch.randn(4, 8)
amp_model = trace(autocastfx.convert, model, (x,))
print(*sorted(upwards - {"_forget"}))  # Python calls that one, when an object goes
amp_model(x)
trace(amp_model, x)
"""


@pytest.fixture(scope="module")
def traced() -> list[list[str]]:
    """The files that a conversion enters, the functions that it calls in a layer above, and the files of a call."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRACED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return [line.split() for line in ran.stdout.splitlines()]


def test_a_reader_of_convert_opens_few_files(traced: list[list[str]]) -> None:
    """A conversion enters at most 55 files of the package, its check included, and a further call at most 8."""
    conversion, _, call = traced
    assert len(conversion) <= 55, conversion
    assert len(call) <= 8, call
    assert "conversion.py" in conversion


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names there")
def test_a_conversion_seldom_calls_a_layer_above(traced: list[list[str]]) -> None:
    """A model handed to ``convert`` goes down the layers; its runtime calls the passes up, and Dynamo the runtime."""
    assert traced[1] == ["Converter.convert_graph", "_run"]


if __name__ == "__main__":
    found = [*broken(PACKAGE), *without_mirror(PACKAGE, ROOT / "tests", OF_MANY)]
    print(*found, f"{len(found)} violations", sep="\n")
    raise SystemExit(bool(found))
