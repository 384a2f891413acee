"""A script that knows nothing of this package runs with its models converted, and it is told what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.cli.main import main
from autocastfx.errors import ClippedValuesWarning, UncapturedGraphWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEAD = "import sys\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\nx = torch.randn(8, 16)\n"
MODEL = "model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))\n"
STEP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = nn.CrossEntropyLoss()(model(x), torch.arange(8) % 4)
loss.backward()
optimizer.step()
"""
SCALED = """
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for factor in (1, 1e30, 1):
    optimizer.zero_grad()
    scaler.scale(model(x * factor).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
print(type(scaler).__mro__[1].__module__, scaler.get_scale())
"""

Run = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def run_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script's text; gives the exit code, its output and the report."""

    def run(text: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, dict[str, Any]]:
        script, report = tmp_path / "train.py", tmp_path / "report.json"
        script.write_text(HEAD + text)
        code = main(["run", *options, "--report", str(report), str(script), *arguments])
        return code, capsys.readouterr().out, json.loads(report.read_text()) if report.exists() else {}

    return run


def test_a_model_is_converted_at_its_first_call(run_script: Run) -> None:
    text = MODEL + STEP + "print(sys.argv[1:], __name__, model(x).sum().item())"
    code, out, report = run_script(text, arguments=("--dtype", "7"))
    assert code == 0
    plain = subprocess.run([sys.executable, "-c", HEAD + text], capture_output=True, text=True, check=True).stdout
    assert out.startswith("['--dtype', '7'] __main__ ")
    assert out.split()[-1] != plain.split()[-1]
    assert float(out.split()[-1]) == pytest.approx(float(plain.split()[-1]), abs=0.1)
    (model,) = report["models"]
    assert model["name"] == "Sequential"
    assert model["where"].endswith("train.py:9")
    assert model["graphs"][0] == {"low": 3, "float32": 0, "casts": 6, "failure": ""}
    assert (report["dtype"], report["steps"], report["left"]) == ("bfloat16", 1, [])


def test_the_calling_line_is_found_where_packages_are_links(tmp_path: Path) -> None:
    """As in a linked virtual environment, or one that a package manager builds of links."""
    for package in (torch, autocastfx):
        folder = Path(package.__file__ or "").parent
        (tmp_path / folder.name).symlink_to(folder.resolve())
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(HEAD + MODEL + STEP)
    command = [sys.executable, "-m", "autocastfx", "run", "--report", str(report), str(script)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    (model,) = json.loads(report.read_text())["models"]
    assert model["where"] == f"{script}:9"


def test_nothing_stays_patched(run_script: Run) -> None:
    before = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.compile, nn.Module._compiled_call_impl)
    with pytest.raises(ZeroDivisionError):
        run_script(MODEL + "model(x)\n1 / 0")
    assert (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.compile, nn.Module._compiled_call_impl) == before


def test_the_exit_code_is_the_scripts_and_the_report_is_written(run_script: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        run_script(MODEL + "model(x)\nsys.exit(7)")
    assert error.value.code == 7
    assert len(json.loads((tmp_path / "report.json").read_text())["models"]) == 1


def test_a_grad_scaler_is_ours_and_its_skips_are_counted(run_script: Run) -> None:
    with pytest.warns(ClippedValuesWarning, match="128 values of 'input_1' were beyond 65,504"):
        _, out, report = run_script(MODEL + SCALED, "--dtype", "float16")
    assert out.split() == ["autocastfx.training.grad_scaler", "32768.0"]
    assert (report["steps"], report["skipped_steps"], report["unscaled_steps"]) == (2, 1, 0)


@pytest.mark.parametrize("made", ["torch.cuda.amp.GradScaler(2.0**10, enabled=False)", 'torch.amp.GradScaler("cpu")'])
def test_either_name_of_the_scaler(made: str, run_script: Run) -> None:
    text = f"scaler = {made}\nfrom torch.cuda.amp import GradScaler\nprint(isinstance(scaler, torch.amp.GradScaler))"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_script(text)[1] == "True\n"


def test_float16_without_a_scaler_is_warned_of(run_script: Run) -> None:
    with pytest.warns(UserWarning, match="SGD steps by gradients of an unscaled float16 loss"):
        _, _, report = run_script(MODEL + STEP, "--dtype", "float16")
    assert report["unscaled_steps"] == 1


def test_the_scripts_own_autocast_is_left_alone_and_counted(run_script: Run) -> None:
    text = """
with torch.autocast("cpu", torch.bfloat16):
    for _ in range(3):
        y = model(x)
print(y.dtype, model(x).dtype)
"""
    _, out, report = run_script(MODEL + text)
    assert out == "torch.bfloat16 torch.float32\n"
    (left,) = report["left"]
    assert (left["name"], left["calls"]) == ("Sequential", 3)
    assert left["reason"] == "called in the script's own torch.autocast"
    assert len(report["models"]) == 1


def test_what_is_enabled_outside_of_the_scripts_own_autocast_is_left_alone_inside_of_it(run_script: Run) -> None:
    """A loop trains in its own region, and validates outside; the modules are not converted one by one there."""
    text = """
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16):
        y, part = model(x), model[0](x)
    with torch.no_grad():
        model(x)
    print(y.dtype, part.dtype)
"""
    _, out, report = run_script(MODEL + text)
    assert out == "torch.bfloat16 torch.bfloat16\n" * 2
    assert [len(one["graphs"]) for one in report["models"]] == [1]
    assert sum(one["calls"] for one in report["left"]) == 4


GROWING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        width = {call}(x).shape[-1]
        self.layers.append(nn.Sequential(nn.Linear(width, 4), nn.LayerNorm(4)))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
net = Net()
print(net(x).shape[-1])
"""


@pytest.mark.parametrize("call", ["self", "self.forward"])
def test_a_model_that_calls_itself_while_it_is_made_is_enabled_once_it_is_made(call: str, run_script: Run) -> None:
    _, out, report = run_script(GROWING.format(call=call))
    assert out == "4\n"
    assert [(one["name"], len(one["graphs"])) for one in report["models"]] == [("Net", 1)]
    (left,) = report["left"]
    assert (left["name"], left["reason"], left["calls"]) == ("Net", "called while it is made", 1)


def test_a_part_that_was_called_by_itself_runs_as_the_whole_calls_it(run_script: Run) -> None:
    text = """
class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.layer, self.inner = nn.Linear(16, 16), inner
    def forward(self, x):
        for _ in range(2):
            x = self.inner(self.layer(x))
            if x.sum() > 1e9:
                x = x * 0.5
        return x
inner = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
inner(x)
net = Net(inner)
for _ in range(3):
    net(x).sum().backward()
"""
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward at .*train.py"):
        _, _, report = run_script(text)
    assert (report["models"][0]["name"], len(report["models"][0]["graphs"])) == ("Sequential", 1)
    assert report["left"] == []


LEFT = {
    "torch.compile(model, backend='eager')(x)": ("Sequential", "the script compiles it"),
    "model.compile(backend='eager'); model(x)": ("Sequential", "the script compiles it"),
    "model.double()(x.double())": ("Sequential", "its parameters are torch.float64"),
    "import autocastfx; autocastfx.convert(model, x)(x)": ("AmpModule", "the script converts it"),
    "nn.DataParallel(model)(x)": ("DataParallel", "nn.DataParallel copies it in each call"),
}


@pytest.mark.parametrize("text", LEFT)
def test_what_is_left_alone_is_told(text: str, run_script: Run) -> None:
    _, _, report = run_script(MODEL + text)
    assert report["models"] == []
    assert {(left["name"], left["reason"]) for left in report["left"]} == {LEFT[text]}


def test_models_are_told_apart_and_losses_are_none(run_script: Run) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    def forward(self, x):
        x = self.layers[0](x)
        print(x.sum().item() != 0, end=" ")
        return self.layers[1](x)
first, second = Net(), nn.Linear(16, 1)
for _ in range(2):
    nn.MSELoss()(second(first(x)), torch.zeros(8, 1)).backward()
"""
    _, out, report = run_script(text)
    assert out == "True " * 2
    assert [model["name"] for model in report["models"]] == ["Net", "Linear"]
    assert report["left"] == []


def test_code_that_cannot_be_captured_is_in_the_report(run_script: Run) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, x):
        for _ in range(2):
            if x.sum() > 1e9:
                continue
            x = self.layer(x)
        return x
model = Net()
model(x), model(x)
"""
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward at .*train.py"):
        _, _, report = run_script(text)
    (model,) = report["models"]
    assert len(model["skipped"]) == 1
    assert report["left"] == []


def test_a_checkpoint_of_the_script_is_recomputed_as_it_ran(run_script: Run) -> None:
    text = """
from torch.utils.checkpoint import checkpoint
x.requires_grad_()
checkpoint(model, x, use_reentrant=False).sum().backward()
print(x.grad.norm().item() > 0)
"""
    _, out, report = run_script(MODEL + text)
    assert out == "True\n"
    assert len(report["models"]) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_which_the_graph_breaks_runs_in_backward_as_before(run_script: Run, reentrant: bool) -> None:
    text = f"""
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.log = nn.Linear(8, 8), nn.Linear(8, 8), []
    def body(self, x):
        h = torch.relu(self.a(x))
        self.log.append(h.mean().item())
        return x + self.b(h)
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant={reentrant})
class Norm(nn.Sequential):
    def forward(self, x):
        return super().forward(x) / super().forward(x).norm().item()
model = Norm(nn.Linear(8, 8), Block(), Block())
x = torch.randn(4, 8)
for _ in range(3):
    model.zero_grad()
    model(x).square().sum().backward()
    print(model[1].a.weight.grad.isfinite().all().item())
"""
    with pytest.warns(UncapturedGraphWarning, match="cannot capture forward at .*train.py"):
        code, out, report = run_script(text)
    assert (code, out) == (0, "True\n" * 3)
    assert [one["name"] for one in report["models"]] == ["Norm"]


def test_bad_input_is_told_before_the_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, ran = tmp_path / "train.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "bad.yaml").write_text("alow: []\n")
    for options, told in (
        (["--op-list", str(tmp_path / "bad.yaml"), str(script)], "alow"),
        (["--report", str(tmp_path / "none" / "report.json"), str(script)], "none"),
        ([str(tmp_path / "other.py")], "there is no script"),
    ):
        assert main(["run", *options]) in (1, 2)
        assert told in capsys.readouterr().err
    assert not ran.exists()


def test_the_summary_says_when_nothing_was_converted(run_script: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", "-m", "this"])
    assert code == 0
    assert "no model was called in this process: nothing is converted" in capsys.readouterr().err


@pytest.mark.filterwarnings("default:AUTOCASTFX_DISABLE")
def test_the_environment_lets_the_script_run_as_it_is(run_script: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCASTFX_DISABLE", "1")
    text = MODEL + STEP + "print(model(x).sum().item())"
    plain = subprocess.run([sys.executable, "-c", HEAD + text], capture_output=True, text=True, check=True).stdout
    _, out, report = run_script(text)
    assert (out, report) == (plain, {})
