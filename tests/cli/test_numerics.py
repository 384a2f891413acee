"""``autocastfx compare`` and ``bisect``, driven as a person would, with good and with bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import autocastfx
from tests.cli.run_command import run
from tests.report.shown import nodes_in

ROOT = Path(__file__).resolve().parents[2]
MODELS = """
import time
from pathlib import Path

import torch
from torch import nn


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.log1p(torch.exp(self.layer(x) + 20) / 1e9)


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Weights(), nn.Linear(8, 4))


def frozen():
    return model().requires_grad_(False)


class Named(nn.Module):
    def forward(self, ids, scale):
        return ids


def batch():
    return (torch.linspace(-1, 1, 32).reshape(4, 8),)


def square():
    return lambda output: output.float().square().mean()


def worst():
    return lambda amp_model: float(amp_model.plan.by_op().get(("exp", "low"), 0))


def unmended():
    return lambda amp_model: 1.0 / (1 + sum(node.placement.run == "float32" for node in amp_model.plan.nodes))


def slow():
    calls = []

    def metric(amp_model):
        calls.append(None)
        if len(calls) > 1:
            Path("second").touch()
            time.sleep(60)  # whoever waits for the file has time to interrupt
        return 1.0

    return metric


def fails():
    def metric(amp_model):
        raise ValueError("no data here")

    return metric


def stopped():
    def metric(amp_model):
        raise KeyboardInterrupt

    return metric


def number():
    return 3


def negative():
    return lambda amp_model: -1.0


@torch.library.custom_op("numerics_picky::exact", mutates_args=())
def exact(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("float32 only")
    return 2 * x


exact.register_fake(torch.empty_like)


class Inner(nn.Module):
    def forward(self, x):
        return exact(x)


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)
"""
INPUTS = ("--inputs", "numerics_models:batch", "--dtype", "float16")
FAULTY = (*INPUTS, "--op-list", "default", "mine.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("numerics")
    (folder / "numerics_models.py").write_text(MODELS)
    (folder / "mine.yaml").write_text("allow: [exp]\n")
    (folder / "picky.yaml").write_text('allow: ["numerics_picky::exact"]\n')
    (folder / "broken.yaml").write_text("allow: [exp\n")
    (folder / "other.json").write_text("{}")
    yield folder
    sys.modules.pop("numerics_models", None)


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_compare_prints_the_table_of_compare(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    code, out, err = run(capsys, "compare", "numerics_models:model", *INPUTS, "--mode", "eval", "--most", "2")
    assert (code, err) == (0, "")
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sys.modules["numerics_models"].model().eval()
    x = sys.modules["numerics_models"].batch()
    assert out == autocastfx.compare(None, autocastfx.convert(model, x, dtype="float16"), *x).table(2) + "\n"


def test_check_prints_the_check_and_ends_with_1_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "numerics_models:model", *INPUTS)
    assert (code, err) == (0, "")
    assert re.match(r"check of \w+ in float16: right\n  as captured, without a cast: \d+ calls, 0 differences\n", out)
    code, out, _ = run(capsys, "check", "numerics_models:model", *FAULTY, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert run(capsys, "check", "numerics_models:model")[2].endswith("check runs the model: give --inputs.\n")


def test_compare_of_a_fault_ends_with_1_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compare", "numerics_models:model", *FAULTY, "--gradients", "--in-order")
    assert code == 1
    assert "Inf and NaN begin at exp (exp) in module 2\n" in out
    values, _, gradients = out.partition("\ngradients\n")
    assert values.splitlines()[1].startswith("linear ")
    assert gradients.splitlines()[1].startswith("linear_2 ")
    assert "2.layer.weight" in gradients
    assert "exp (exp) in module 2 gives 32 Inf in float16." in gradients
    assert gradients.endswith('  - {path: "2", category: float32, ops: [exp]}\n')


def test_compare_writes_a_page_with_its_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    given = ("compare", "numerics_models:model", *FAULTY, "--mode", "eval", "--page", str(page))
    assert run(capsys, *given)[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["compared.html"]
    assert sum("numerics" in node for node in nodes_in(page.read_text(encoding="utf-8"))) == 7


def test_compare_as_json_with_a_loss_and_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--json", "--gradients", "--loss", "numerics_models:square", "--scale", "1024", "--seed")
    found: list[autocastfx.Comparison] = []
    for seed in ("1", "1", "2"):
        code, out, _ = run(capsys, "compare", "numerics_models:model", *INPUTS, *options, seed)
        assert code == 0
        found.append(autocastfx.Comparison.from_json(out))
    assert found[0] == found[1] != found[2], "dropout"
    assert (found[0].scale, found[0].variant.mode) == (1024, "train")
    assert len(found[0].parameters) == 6


def test_bisect_writes_a_list_that_mends_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target, file = tmp_path / "keep.yaml", tmp_path / "search.json"
    command = ("bisect", "numerics_models:model", *FAULTY, "--tolerance", "0.02", "-o", str(target))
    code, out, err = run(capsys, *command, "--resume", str(file))
    assert code == 0
    assert out.startswith("float32 for 2.exp: metric 0.0")
    assert f"--op-list default {target}" in out
    assert "evaluations made, at most 1 more for the place searched for" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep.yaml", "search.json"]
    assert "found by bisection: 0.0" in target.read_text()
    assert run(capsys, "compare", "numerics_models:model", *FAULTY, str(target))[0] == 0
    code, out, err = run(capsys, *command, "--resume", str(file), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["places"], found["evaluations"], found["low"]) == ([{"module": "2", "op": "exp"}], 0, "inf")


@pytest.mark.parametrize("metric", ["difference", "numerics_models:worst"])
def test_bisect_takes_other_metrics(capsys: pytest.CaptureFixture[str], tmp_path: Path, metric: str) -> None:
    target = str(tmp_path / "keep.yaml")
    options = ("--metric", metric, "--tolerance", "0.05", "-o", target, "--mode", "eval")
    code, out, _ = run(capsys, "bisect", "numerics_models:model", *FAULTY, *options)
    assert code == 0
    assert out.startswith("float32 for 2.exp: ")


def test_a_metric_of_ones_own_may_be_negative(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--metric", "numerics_models:negative", "--tolerance", "-0.5", "-o", str(tmp_path / "keep.yaml"))
    code, out, _ = run(capsys, "bisect", "numerics_models:model", *INPUTS, *options)
    assert code == 0
    assert out.startswith("float32 for nothing: metric -1")


def test_a_kernel_that_refuses_is_named_with_the_whole_list_that_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "compare", "numerics_models:Picky", "--inputs", "float32[4]", "--op-list", "picky.yaml"
    )
    assert (code, out) == (3, "")
    assert "numerics_picky::exact) in module inner raised RuntimeError: float32 only. Its line is " in err
    listed = err.partition("add this to your op list:\n")[2]
    assert yaml.safe_load(listed) == {
        "modules": [{"path": "inner", "category": "float32", "ops": ["numerics_picky::exact"]}]
    }


def test_a_metric_that_float32_does_not_mend_ends_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "keep.yaml"
    options = ("--metric", "numerics_models:unmended", "--tolerance", "0.01", "-o", str(target))
    code, out, err = run(capsys, "bisect", "numerics_models:model", *INPUTS, *options)
    assert (code, out) == (1, "")
    assert "autocastfx: error: with all" in err
    assert not target.exists()


_BISECT = ["bisect", "numerics_models:model", *INPUTS, "-o", "x.yaml", "--tolerance"]
BAD = {
    "no such model": (["compare", "numerics_models:modle", *INPUTS], 2, "did you mean 'model'?"),
    "no inputs": (["compare", "numerics_models:model"], 2, "compare runs the model: give --inputs."),
    "nor here": (["bisect", "numerics_models:model", "--tolerance", "1", "-o", "x"], 2, "bisect runs the model: give"),
    "wrong shapes": (["compare", "numerics_models:model", "--inputs", "float32[4,9]"], 3, "Sequential fails: "),
    "broken YAML": (["compare", "numerics_models:model", *INPUTS, "--op-list", "broken.yaml"], 1, "broken.yaml:2:1: "),
    "no such list": ([*_BISECT, "1", "--op-list", "no.yaml"], 2, "cannot read the op list no.yaml"),
    "a loss without gradients": (
        ["compare", "numerics_models:model", *INPUTS, "--loss", "numerics_models:square"],
        2,
        "give --gradients",
    ),
    "no loss": (
        ["compare", "numerics_models:model", *INPUTS, "--gradients", "--loss", "numerics_models:number"],
        2,
        "numerics_models:number gave a int: the factory of a loss returns a function.",
    ),
    "a scale twice": (
        [
            *("compare", "numerics_models:Named", "--inputs", "ids=int64[4]", "scale=float32[4]"),
            *("--gradients", "--scale", "2"),
        ],
        2,
        "the model has an input called 'scale' itself: leave --scale away.",
    ),
    "fewer than none": (["compare", "numerics_models:model", *INPUTS, "--most", "-3"], 2, "from 0 on, not -3."),
    "no scale": (
        ["compare", "numerics_models:model", *INPUTS, "--gradients", "--scale", "inf"],
        2,
        "--scale is a finite number above 0, not inf.",
    ),
    "nothing to train": (["compare", "numerics_models:frozen", *INPUTS, "--gradients"], 3, "unfreeze a parameter"),
    "no tolerance": ([*_BISECT, "nan"], 2, "--tolerance is a finite number, not nan."),
    "a negative one": ([*_BISECT, "-1"], 2, "--tolerance of the metric error is from 0 on, not -1.0."),
    "no metric": ([*_BISECT, "1", "--metric", "eror"], 2, "cannot read 'eror': a metric is package.module:factory."),
    "a metric that fails": ([*_BISECT, "1", "--metric", "numerics_models:fails"], 3, "ValueError: no data here"),
    "another file": ([*_BISECT, "1", "--resume", "other.json"], 2, "other.json holds no evaluations of a search"),
    "no folder for a page": (
        ["compare", "numerics_models:model", *INPUTS, "--page", "no/x.html"],
        2,
        "the folder no does not exist",
    ),
    "no such folder": ([*_BISECT, "1", "--resume", "no/x.json"], 2, "the folder no does not exist"),
    "a folder": (["bisect", "numerics_models:model", *INPUTS, "--tolerance", "1", "-o", "."], 2, "it is a folder"),
    "no numbers": (
        [
            *("bisect", "numerics_models:Named", "--inputs", "ids=int64[4]", "scale=float32[4]"),
            *("--tolerance", "1", "-o", "x.yaml"),
        ],
        3,
        "give a metric of your own",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_is_a_line_or_two_and_an_exit_code(capsys: pytest.CaptureFixture[str], what: str) -> None:
    argv, expected, said = BAD[what]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (expected, "")
    (line,) = (line for line in err.splitlines() if line.startswith("autocastfx: error: "))
    assert said in err
    assert line
    assert not Path("x.yaml").exists()


def test_ctrl_c_ends_with_130_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "keep.yaml"
    options = ("--metric", "numerics_models:stopped", "--tolerance", "1", "-o", str(target))
    code, out, err = run(capsys, "bisect", "numerics_models:model", *INPUTS, *options)
    assert (code, out) == (130, "")
    assert err.endswith("autocastfx: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_interrupted_goes_on(folder: Path, tmp_path: Path) -> None:
    target, file = tmp_path / "keep.yaml", tmp_path / "search.json"
    options = ["--metric", "numerics_models:slow", "--tolerance", "0.1", "-o", str(target), "--resume", str(file)]
    command = [sys.executable, "-m", "autocastfx", "bisect", "numerics_models:model", *INPUTS, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background inherit "ignore"
    )
    try:
        until = time.monotonic() + 120
        while not (folder / "second").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert said.endswith(f"autocastfx: the same command goes on from {file}\nautocastfx: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]
    assert json.loads(file.read_text())["known"]
