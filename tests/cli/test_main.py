"""The command line, driven as a person would, with good and with bad input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autocastfx
from autocastfx.cli.main import main
from autocastfx.plan.plan import Why
from autocastfx.policy.rule import Category
from tests.cli.run_command import run
from tests.golden.models import comparable
from tests.golden.readme import blocks
from tests.helpers import with_pinned_torch

# The command shows warnings on standard error; here they must not be raised.
pytestmark = pytest.mark.filterwarnings("always::autocastfx.errors.UnmatchedRuleWarning")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"
MODELS = """
import torch
from torch import nn


def small():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Dropout(0.5))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids, mask=None):
        x = self.head(self.table(ids))
        return x if mask is None else x.masked_fill(mask, 0)


class Sign(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Sized(nn.Module):
    def __init__(self, width, depth=1):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)


class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = torch.softmax(self.a(x), -1)
        return self.b(x * torch.sigmoid(x))


def batch(width=32, scale=1):
    return (torch.ones(4, width) * scale,)


def large():
    return [batch(32, 1e6), batch()]


def keywords():
    return {"ids": torch.zeros(2, 5, dtype=torch.int64)}


def raises():
    raise ValueError("no weights here")


def interrupted():
    raise KeyboardInterrupt


def number():
    return 3


LIMIT = 3
MODEL = small()
"""
INPUTS = ("--inputs", "float32[4,32]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models that can be imported from it, and lists."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_models.py").write_text(MODELS)
    (folder / "cli_broken.py").write_text("import cli_missing\n")
    (folder / "mine.yaml").write_text("extends: float16\ndeny:\n  - gelu: {reason: measured}\n  - log_softmax\n")
    (folder / "used.yaml").write_text("deny: [gelu]\nallow: [dropout]\n")
    (folder / "broken.yaml").write_text("deny: [gelu\n")
    (folder / "wrong.yaml").write_text("deny:\n  - softmx\n")
    yield folder
    for name in ("cli_models", "net"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_dump_writes_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "dump", "cli_models:small", *INPUTS, "--format", "html", "-o", "model.html")
    assert (code, out, err) == (0, "", "")
    assert Path("model.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>\n")


def test_a_page_tells_what_another_plan_decides_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "dump", "cli_models:small", *INPUTS, "-o", "before.json")[0] == 0
    options = (*INPUTS, "--op-list", "default", "used.yaml", "--against", "before.json")
    assert run(capsys, "dump", "cli_models:small", *options, "-o", "after.html") == (0, "", "")
    assert '"before":{"runs":' in Path("after.html").read_text(encoding="utf-8")
    code, _, err = run(capsys, "dump", "cli_models:small", *INPUTS, "--against", "before.json")
    assert code == 2
    assert "against= goes into format='html', not 'text'" in err
    code, _, err = run(capsys, "dump", "cli_models:small", *INPUTS, "--against", "gone.json", "-o", "after.html")
    assert (code, "cannot read the plan gone.json" in err) == (2, True)


def model() -> torch.nn.Module:
    return sys.modules["cli_models"].small()


def test_dump_prints_what_dump_returns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "dump", "cli_models:small", *INPUTS)
    assert (code, err) == (0, "")
    assert out == autocastfx.dump(autocastfx.convert(model(), (torch.ones(4, 32),), check=False), width=None)


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--full"], {"full": True}),
        (["--only", "casts"], {"only": "casts"}),
        (["--module", "[01]"], {"module": "[01]"}),
        (["--summary"], {"summary": True}),
        (["--width", "60"], {"width": 60}),
        (["--width", "0"], {}),
    ],
    ids=str,
)
def test_dump_takes_what_dump_takes(
    capsys: pytest.CaptureFixture[str], argv: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    said = run(capsys, "dump", "cli_models:small", *INPUTS, *argv)
    expected = autocastfx.dump(
        autocastfx.convert(model(), (torch.ones(4, 32),), check=False), **{"width": None, **options}
    )
    assert said == (0, expected, "")
    assert run(capsys, "dump", "cli_models:small", *INPUTS, *argv, "-o", str(tmp_path / "x.txt")) == (0, "", "")
    assert (tmp_path / "x.txt").read_text(encoding="utf-8") == expected


def test_dump_takes_dtype_lists_mode_and_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    options = ("--dtype", "bfloat16", "--op-list", "default", "used.yaml", "--mode", "eval", "--format", "json")
    code, out, err = run(
        capsys, "dump", "cli_models:small", "--inputs", "cli_models:batch", *options, "-o", str(target)
    )
    assert (code, out) == (0, "")
    assert err.endswith("used.yaml:2:9: no node of the model is 'dropout'. Captured so far: eval mode alone.\n")
    plan = autocastfx.Plan.from_json(target.read_text(encoding="utf-8"))
    assert (plan.low, plan.op_list) == ("bfloat16", "bfloat16+used")
    assert plan["gelu"].decision.category is Category.DENY
    assert not [node for node in plan.nodes if node.op == "dropout"]


def test_without_inputs_there_is_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "dump", "cli_models:small", "--format", "python")
    assert (code, out) == (3, "")
    assert "no graph to show before the first call" in err
    assert "Here that is --inputs." in err


@pytest.mark.parametrize("inputs", [["ids=int64[2,5]<50", "mask=bool[2,5,1]"], ["cli_models:keywords"]])
def test_inputs_may_be_given_by_keyword(capsys: pytest.CaptureFixture[str], inputs: list[str]) -> None:
    code, out, err = run(capsys, "dump", "cli_models:Tokens", "--inputs", *inputs)
    assert (code, err) == (0, "")
    assert ("masked_fill" in out) == (len(inputs) == 2)


def test_explain_says_what_explain_returns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", "cli_models:small", "gelu", "3", *INPUTS)
    assert (code, err) == (0, "")
    amp_model = autocastfx.convert(model(), (torch.ones(4, 32),), check=False)
    assert out.split("\n\n")[0] == autocastfx.explain(amp_model, "gelu").strip()
    assert "layer_norm (layer_norm) in module 3 runs in float32: its category is deny." in out
    code, out, err = run(capsys, "explain", "cli_models:small", amp_model.plan.casts[0].name, *INPUTS)
    assert (code, out, err) == (0, autocastfx.explain(amp_model, amp_model.plan.casts[0].name), "")
    code, out, _ = run(capsys, "explain", "cli_models:small", "gelu", *INPUTS, "--json")
    (found,) = json.loads(out)
    assert (found["what"], [node["name"] for node in found["nodes"]]) == ("gelu", ["gelu"])
    assert found["nodes"][0]["placement"]["run"] == "low"


def test_diff_of_a_model_under_two_lists(capsys: pytest.CaptureFixture[str]) -> None:
    lists = ("--op-list", "default", "--op-list", "default", "used.yaml")
    code, out, _ = run(capsys, "diff", "cli_models:small", *INPUTS, *lists, "--json")
    assert code == 1
    changed = json.loads(out)["changed"]
    assert (changed[0]["name"], changed[0]["moved"]) == ("gelu", True)
    code, out, _ = run(capsys, "diff", "cli_models:small", *INPUTS, "--op-list", "default", "--op-list", "float16")
    assert code == 0
    assert "nodes moved: none" in out


def test_diff_of_two_plans_in_files(capsys: pytest.CaptureFixture[str]) -> None:
    for name, lists in {"a.json": ["default"], "b.json": ["mine.yaml"]}.items():
        options = ("--format", "json", "-o", name, "--op-list", *lists)
        assert run(capsys, "dump", "cli_models:small", *INPUTS, *options)[0] == 0
    assert run(capsys, "diff", "a.json", "a.json")[0] == 0
    code, out, _ = run(capsys, "diff", "a.json", "b.json")
    assert code == 1
    assert "nodes moved: 1 from low to float32" in out


def test_check_names_the_place_of_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "lists", "check", "wrong.yaml")
    assert (code, out) == (1, "")
    assert err.startswith("autocastfx: error: wrong.yaml:2:5: no ATen op is named 'softmx' (did you mean 'softmax'?).")


def test_check_says_what_each_rule_decides(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "cli_models:small", *INPUTS)
    code, out, err = run(capsys, "lists", "check", "mine.yaml", *options)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "mine.yaml:3:5: gelu (deny) decides 1: gelu",
        "mine.yaml:4:5: no node of the model is 'log_softmax'.",
    ]
    code, out, _ = run(capsys, "lists", "check", "default", "used.yaml", *options, "--json")
    assert code == 0
    assert [(use["subject"], use["nodes"]) for use in json.loads(out)] == [("gelu", ["gelu"]), ("dropout", ["dropout"])]


def test_a_rule_that_another_one_overrules_is_told_apart(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "two.yaml").write_text("deny: [gelu]\nmodules: [{path: '1', category: low}]\n")
    code, out, _ = run(capsys, "lists", "check", "default", "two.yaml", "--model", "cli_models:small", *INPUTS)
    assert code == 0
    assert out.splitlines() == [
        "two.yaml:1:8: gelu (deny) matches only nodes that something else decides",
        "two.yaml:2:11: modules 1 (low) decides 1: gelu",
    ]


def test_a_list_is_shown_as_one_that_reads_back_equal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "lists", "show", "mine.yaml")
    (tmp_path / "shown.yaml").write_text(out, encoding="utf-8")
    assert code == 0
    assert autocastfx.load_op_list(tmp_path / "shown.yaml") == autocastfx.load_op_list("mine.yaml")
    code, out, _ = run(capsys, "lists", "show", "used.yaml", "--json")
    assert [(rule["subject"], rule["source"]) for rule in json.loads(out)] == [
        ("dropout", "used.yaml:2:9"),
        ("gelu", "used.yaml:1:8"),
    ]


def test_lists_path_and_diff(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "lists", "path", "float16")
    assert code == 0
    assert Path(out.strip()).name == "float16.yaml"
    assert Path(out.strip()).is_file()
    code, out, _ = run(capsys, "lists", "diff", "default", "mine.yaml")
    assert code == 1
    assert out.startswith("gelu: infer → deny\n")
    assert run(capsys, "lists", "diff", "float16", "default")[:2] == (0, "both say the same\n")


def test_convert_saves_a_model_that_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "model.pt"
    code, out, err = run(capsys, "convert", "cli_models:small", *INPUTS, "--mode", "eval", "-o", str(target))
    assert (code, err) == (0, "")
    assert "weights_only=False" in out
    assert list(tmp_path.iterdir()) == [target]
    loaded = torch.load(target, weights_only=False)
    assert loaded(torch.ones(3, 32)).shape == (3, 8)


@pytest.fixture
def saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """A file of a converted model."""
    target = str(tmp_path / "model.pt")
    assert run(capsys, "convert", "cli_models:small", *INPUTS, "--mode", "eval", "-o", target)[0] == 0
    return target


def test_a_converted_model_is_read_again(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    loaded = torch.load(saved, weights_only=False)
    loaded(torch.ones(4, 32))
    code, out, err = run(capsys, "dump", saved, "--trust", *INPUTS, "--only", "low")
    assert (code, out, err) == (0, autocastfx.dump(loaded, only="low", width=None), "")
    assert "model: Sequential\n" in out
    code, out, err = run(capsys, "explain", saved, "gelu", "--trust", *INPUTS)
    assert (code, out, err) == (0, autocastfx.explain(loaded, "gelu"), "")
    assert run(capsys, "dump", saved, *INPUTS)[0] == 2, "without --trust"
    code, _, err = run(capsys, "dump", saved, "--trust")
    assert (code, "Here that is --inputs." in err) == (3, True)


@pytest.mark.parametrize(
    "options", [["--op-list", "base"], ["--fold", "none"], ["--no-recompose"], ["--dtype", "float16"]]
)
def test_it_is_not_converted_anew(capsys: pytest.CaptureFixture[str], saved: str, options: list[str]) -> None:
    code, _, err = run(capsys, "dump", saved, "--trust", *options)
    assert code == 2
    assert "the file holds a model that is converted already, to bfloat16: leave " + options[0] in err
    assert "give the original" in run(capsys, "lint", saved, "--trust", *INPUTS)[2]


def test_a_model_is_an_instance_a_class_or_a_call_with_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    expected = run(capsys, "dump", "cli_models:small", *INPUTS)
    assert run(capsys, "dump", "cli_models:MODEL", *INPUTS) == expected
    code, out, _ = run(capsys, "dump", "cli_models:Sized(8, depth=2)", "--inputs", "cli_models:batch(8)")
    assert code == 0
    assert "model: Sized\n" in out
    assert "linear_1" in out
    assert "linear_2" not in out


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> autocastfx.Plan:
    code, out, err = run(capsys, "dump", "cli_models:Soft", "--format", "json", *options)
    assert (code, err) == (0, "")
    return autocastfx.Plan.from_json(out)


def test_dump_takes_what_convert_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = planned(capsys, *INPUTS)
    runs = {node.op: str(node.placement.run) for node in plan.nodes}
    assert (plan.device, runs["softmax"]) == ("cpu", "float32")
    assert [one.pattern for one in plan.recomposed] == ["silu"]
    assert planned(capsys, *INPUTS, "--device", "cuda").device == "cuda"
    folded = planned(capsys, *INPUTS, "--fold", "kernel")["softmax"].placement
    assert folded.because.why is Why.FOLDED
    assert not planned(capsys, *INPUTS, "--no-recompose").recomposed
    assert not planned(capsys, *INPUTS, "--recompose", "softmax").recomposed
    data = json.loads(plan.to_json())
    placement = next(node["placement"] for node in data["nodes"] if node["name"] == "softmax")
    placement["run"] = placement["store"] = "low"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    edited = planned(capsys, *INPUTS, "--plan", str(tmp_path / "plan.json"))
    assert str(edited["softmax"].placement.run) == "low"


def test_values_are_measured_before_the_conversion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    large = {"calls": "cli_models:large", "a call": "cli_models:batch(32, 1e6)"}
    for batches in large.values():
        for inputs in (INPUTS, ()):
            plan = planned(capsys, "--dtype", "float16", "--calibrate", batches, *inputs)
            assert plan["linear"].decision.source == "forced:range"
    assert (
        planned(capsys, "--dtype", "float16", "--calibrate", "float32[4,32]")["linear"].decision.source
        != "forced:range"
    )
    found = autocastfx.calibrate(sys.modules["cli_models"].Soft(), sys.modules["cli_models"].large())
    found.save(tmp_path / "ranges.json")
    plan = planned(capsys, "--dtype", "float16", *INPUTS, "--calibrate", str(tmp_path / "ranges.json"))
    assert plan["linear"].decision.source == "forced:range"


BAD = {
    "no such module": (["dump", "cli_nothing:small"], 2, "there is no module 'cli_nothing'"),
    "no such factory": (["dump", "cli_models:smal"], 2, "cli_models has no 'smal' (did you mean 'small'?)."),
    "no factory": (["dump", "cli_models"], 2, "a model is package.module:factory"),
    "no callable": (["dump", "cli_models:LIMIT"], 2, "name a model, or something to call"),
    "a model with arguments": (["dump", "cli_models:MODEL()"], 2, "is a model itself: leave the arguments out"),
    "arguments that are code": (["dump", "cli_models:Sized(int('3'))"], 2, "they are literals"),
    "a name that selects nothing": (
        ["dump", "cli_models:small", *INPUTS, "--only", "gleu"],
        2,
        "(did you mean 'gelu'?).",
    ),
    "a module that is not there": (
        ["dump", "cli_models:small", *INPUTS, "--module", "9"],
        2,
        "no module of the model matches '9'",
    ),
    "counts and nodes": (["dump", "cli_models:small", *INPUTS, "--full", "--summary"], 2, "give one of them"),
    "a part of a plan": (
        ["dump", "cli_models:small", *INPUTS, "--only", "low", "--format", "json"],
        2,
        "for the format 'text'",
    ),
    "a narrow table": (["dump", "cli_models:small", *INPUTS, "--width", "9"], 2, "width is at least 40"),
    "a near module": (["dump", "cli_model:small"], 2, "here (did you mean 'cli_models'?)."),
    "a near submodule": (["dump", "torch.outograd:f"], 2, "'torch.outograd' here (did you mean 'torch.autograd'?)."),
    "no device": (
        ["dump", "cli_models:small", "--device", "gpu9"],
        2,
        "--device='gpu9' is not a device that torch knows",
    ),
    "no pattern": (["dump", "cli_models:small", "--recompose", "gelo"], 2, "there is no pattern 'gelo'"),
    "no ranges": (["dump", "cli_models:small", "--calibrate", "none.json"], 2, "no such file of ranges"),
    "no batches": (["dump", "cli_models:small", "--calibrate", "cli_models:number"], 2, "batches are an iterable of"),
    "no plan to obey": (["dump", "cli_models:small", "--plan", "none.json"], 2, "cannot read the plan"),
    "files and a fold": (["diff", "a.json", "b.json", "--fold", "none"], 2, "leave out --fold."),
    "no model": (["dump", "cli_models:number"], 2, "cli_models:number gave a int"),
    "a factory that raises": (["dump", "cli_models:raises"], 3, "cli_models:raises raised ValueError: no weights here"),
    "a module that fails": (["dump", "cli_broken:small"], 3, "importing cli_broken raised ModuleNotFoundError"),
    "sizes that do not fit": (["dump", "cli_models:small", "--inputs", "float32[4,33]"], 3, "Sequential fails: "),
    "no inputs": (["dump", "cli_models:small"], 3, "Here that is --inputs."),
    "control flow": (["dump", "cli_models:Sign", "--inputs", "float32[3]"], 3, "depends on tensor values"),
    "too many inputs": (["dump", "cli_models:small", *INPUTS, "float32[1]"], 3, "do not fit Sequential.forward"),
    "an unreadable input": (["dump", "cli_models:small", "--inputs", "4x32"], 2, "cannot read the input '4x32'"),
    "an unknown dtype": (["dump", "cli_models:small", "--inputs", "float23[4]"], 2, "did you mean 'float32'?"),
    "a bound for floats": (["dump", "cli_models:small", "--inputs", "float32[4]<9"], 2, "is for integers"),
    "a bound of 0": (["dump", "cli_models:Tokens", "--inputs", "int64[4]<0"], 2, "the bound is from 1 to"),
    "an input twice": (["dump", "cli_models:Tokens", "--inputs", "ids=int64[4]", "ids=int64[4]"], 2, "given twice"),
    "two factories of inputs": (
        ["dump", "cli_models:Tokens", "--inputs", *["cli_models:batch"] * 2],
        2,
        "stands alone",
    ),
    "inputs that are none": (["dump", "cli_models:small", "--inputs", "cli_models:number"], 2, "a tuple, a dict or"),
    "a list that is wrong": (["dump", "cli_models:small", "--op-list", "wrong.yaml"], 1, "wrong.yaml:2:5: "),
    "broken YAML": (["lists", "check", "broken.yaml"], 1, "broken.yaml:2:1: this is not YAML"),
    "no such list": (["lists", "check", "nothing.yaml"], 2, "cannot read the op list nothing.yaml"),
    "no such list by name": (["dump", "cli_models:small", "--op-list", "float61"], 2, "did you mean 'float16'?"),
    "no such preset": (["lists", "path", "float61"], 2, "no preset is named 'float61' (did you mean 'float16'?)"),
    "a model without inputs": (["lists", "check", "used.yaml", "--model", "cli_models:small"], 2, "give --inputs"),
    "inputs without a model": (["lists", "check", "used.yaml", *INPUTS], 2, "give --model"),
    "no such folder": (["dump", "cli_models:raises", "-o", "nowhere/x"], 2, "the folder nowhere does not exist"),
    "a folder": (["dump", "cli_models:raises", "-o", "."], 2, "it is a folder; name a file in it"),
    "nothing to save": (["convert", "cli_models:small", "-o", "x.pt"], 2, "give --inputs"),
    "nothing so called": (["explain", "cli_models:small", "gelo", *INPUTS], 2, "called 'gelo' (did you mean 'gelu'?)."),
    "one list to compare": (["diff", "cli_models:small", "--op-list", "default"], 2, "diff takes MODEL with"),
    "weights without a model": (["lists", "check", "used.yaml", "--weights", "w.pt"], 2, "give --model"),
    "files and weights": (["diff", "a.json", "b.json", "--weights", "w.pt"], 2, "leave out --inputs and --weights"),
    "files and inputs": (["diff", "a.json", "b.json", *INPUTS], 2, "leave out --inputs and --weights"),
    "no plan": (["diff", "mine.yaml", "mine.yaml"], 2, "mine.yaml is no plan that dump --format json wrote"),
    "no such plan": (["diff", "x.json", "y.json"], 2, "cannot read the plan x.json: No such file"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_is_a_few_lines_and_an_exit_code(capsys: pytest.CaptureFixture[str], what: str) -> None:
    argv, expected, said = BAD[what]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (expected, "")
    assert err.startswith("autocastfx: error: ")
    assert said in err
    assert len(err.splitlines()) <= 3


def test_the_traceback_is_shown_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "dump", "cli_models:raises", "--traceback")
    assert code == 3
    assert "Traceback" in err
    assert 'raise ValueError("no weights here")' in err


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "dump", "cli_models:interrupted") == (130, "", "autocastfx: interrupted\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["dmp"], "invalid choice: 'dmp' (choose from"),
        (["dmp"], "(did you mean 'dump'?)"),
        (["lists", "shwo"], "(did you mean 'show'?)"),
        (["dump", "m:f", "--format", "jsn"], "(did you mean 'json'?)"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_lists_alone_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "lists")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["default", *autocastfx.presets()]
    assert "base                 What both 16-bit dtypes share\n" in out
    assert all(len(line.split()) > 3 for line in out.splitlines())


@pytest.mark.parametrize("argv", [[], ["dump"], ["dump", "m:f", "--dtype", "float32"], ["dmp"]])
def test_unknown_arguments_end_with_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "--help shows all arguments" in capsys.readouterr().err


def test_the_path_of_imports_and_random_numbers_are_left_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    path, state = list(sys.path), torch.get_rng_state()
    assert run(capsys, "dump", "cli_models:small", *INPUTS)[0] == 0
    assert sys.path == path
    assert torch.equal(torch.get_rng_state(), state)


def test_as_a_process_from_the_current_directory(folder: Path) -> None:
    def process(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autocastfx", *argv]
        environment = {**os.environ, "PYTHONPATH": str(PAGE.parent.parent), "PYTHONUTF8": "1"}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8")

    done = process("dump", "cli_models:small", *INPUTS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("autocastfx: bfloat16 on cpu")
    refused = process("dump", "cli_models:raises")
    assert refused.returncode == 3
    assert refused.stderr == "autocastfx: error: cli_models:raises raised ValueError: no weights here\n"


def test_the_installed_command_is_main() -> None:
    text = (PAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert 'autocastfx = "autocastfx.cli.main:main"' in text.partition("[project.scripts]\n")[2].partition("[")[0]


@with_pinned_torch
def test_the_page_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(PAGE.read_text(encoding="utf-8"))
    for block in found:
        if block.language in ("python", "yaml"):
            name = re.findall(r"`([\w.]+\.(?:py|yaml))`", block.before)[-1]
            Path(name).write_text(block.text, encoding="utf-8")
    ran = 0
    for block in (b for b in found if b.language == "console"):
        for shown in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, expected = shown.partition("\n")
            name, *argv = shlex.split(line)
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
                main(argv)
            assert name == "autocastfx"
            assert comparable(said.getvalue()).strip() == comparable(expected).strip(), line
            ran += 1
    assert ran == 6


def test_the_page_names_every_command_and_is_in_the_index() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for command in (
        "dump",
        "explain",
        "diff",
        "compare",
        "check",
        "bisect",
        "tune",
        "convert",
        "doctor",
        "lists check",
        "lists show",
        "lists path",
        "lists diff",
    ):
        assert re.search(rf"`(autocastfx )?{command}\b|\$ autocastfx {command}\b", text), command
    assert "command-line" in (PAGE.parent / "index.md").read_text(encoding="utf-8").split()
