"""Apply and run patches that each add one thing to the package, and count the files of code that it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent

LIST_KEY = """
from autocastfx import OpList, load_op_list
from autocastfx.cli.main import main
first, second = OpList.of({"note": "of ours", "deny": ["exp"]}), OpList.of({"note": "later"})
assert (first | OpList()).note == "of ours"
assert (first | second).note == "later"
assert str(first.diff(second)[-1]) == "note: of ours → later"
first.save("mine.yaml")
assert load_op_list("mine.yaml") == first
assert main(["lists", "check", "mine.yaml"]) == 0
"""
PASS = """
import torch, autocastfx
from torch import nn
model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8)), torch.ones(2, 8)
amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
assert [node.op for node in amp_model.plan.nodes] == ["linear", "linear"]
plain = autocastfx.convert(model.eval(), (x,), dtype=torch.bfloat16)
assert torch.equal(amp_model(x), plain(x))
"""
FUSED_REPLACEMENT = """
import torch, autocastfx
from torch import nn
model, x = nn.Sequential(nn.Linear(8, 8), nn.Softsign(), nn.Linear(8, 8)), torch.randn(2, 8)
amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
assert [node.op for node in amp_model.plan.nodes] == ["linear", "autocastfx::softsign", "linear"]
assert (amp_model(x) - model(x)).norm() <= 8 * torch.finfo(torch.bfloat16).eps * model(x).norm()
"""

COMMAND = """
from autocastfx.cli.main import main
assert main(["casts", "torch.nn:Linear(8, 4)", "--inputs", "float32[2,8]"]) == 0
"""
FOLD_FACT = """
import torch, autocastfx
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.LogSigmoid(), nn.Linear(8, 8))
plan = autocastfx.convert(model, (torch.ones(2, 8),), dtype=torch.bfloat16, fold="exact").plan
assert [cast.value for cast in plan.casts if cast.dtype == "float32"] == ["linear_1"], plan.casts  # the output alone
"""
PRECISION = """
import torch, autocastfx
from torch import nn
class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.b(torch.logsumexp(self.a(x), 0, keepdim=True))
model, x = Energy(), torch.randn(4, 8)
amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)  # compared with the model, and verified
runs = {node.name: str(node.placement.run) for node in amp_model.plan.nodes}
assert runs == {"linear": "low", "logsumexp": "float64", "linear_1": "low"}, runs
assert [cast.value for cast in amp_model.plan.casts if cast.dtype == "float64"] == ["linear"]
amp_model(x).sum().backward()
assert model.a.weight.grad is not None
assert "runs in float64 and is stored in float32" in autocastfx.explain(amp_model, "logsumexp")
assert "1 float64" in autocastfx.dump(amp_model)
for form in ("dot", "html"):
    autocastfx.dump(amp_model, f"graph.{form}", format=form)
"""
CATEGORY = """
import torch, autocastfx
from torch import nn
from autocastfx.cli.main import main
model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
def runs(category):
    rules = autocastfx.OpList.of({"unlisted": "keep", category: ["linear"], "infer": ["tanh"]})
    plan = autocastfx.convert(model, (x,), dtype=torch.bfloat16, op_list=rules).plan
    return {node.op: str(node.placement.run) for node in plan.nodes}
assert runs("allow") == {"linear": "low", "tanh": "low"}, runs("allow")
assert runs("narrow") == {"linear": "low", "tanh": "float32"}, runs("narrow")
rules = autocastfx.OpList.of({"narrow": [{"reason": "of ours", "ops": ["linear"]}]}, name="mine")
amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16, op_list=["default", rules])
assert "its category is narrow" in autocastfx.explain(amp_model, "linear"), autocastfx.explain(amp_model, "linear")
rules.save("narrow.yaml")
assert main(["lists", "check", "narrow.yaml"]) == 0
"""
REASON = """
import torch, autocastfx
from torch import nn
class Quantiles(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return torch.erfinv(torch.tanh(self.layer(x)))
rules = autocastfx.OpList.of({"infer": ["erfinv"]}, name="mine")
amp_model = autocastfx.convert(Quantiles(), (torch.ones(2, 8),), dtype="float16", op_list=["default", rules])
plan = amp_model.plan
assert str(plan["erfinv"].decision) == "deny, steep at its ends (forced:quantile)", plan["erfinv"]
assert autocastfx.Plan.from_json(plan.to_json()) == plan
assert "steep at its ends (forced:quantile)" in autocastfx.dump(amp_model)
assert "change it: clamp what it reads away from its ends, in the model." in autocastfx.explain(amp_model, "erfinv")
autocastfx.dump(amp_model, "graph.html", format="html")
assert "forced:quantile" in open("graph.html", encoding="utf-8").read()
"""
REPAIR = """
import torch, autocastfx
from torch import nn
class Near(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        h = self.a(x)
        return torch.cdist(h, h + 1)
model, x = Near(), torch.randn(4, 8)
amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
assert {"matmul", "clamp_min"} <= {node.op for node in amp_model.plan.nodes}, amp_model.plan.nodes
autocastfx.enable(model, dtype=torch.bfloat16)
model(x).sum().backward()
assert "matmul" in autocastfx.dump(model) and "clamp_min" in autocastfx.dump(model), autocastfx.dump(model)
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to apply a patch")
@pytest.mark.parametrize(
    ("patch", "script", "files"),
    [
        ("list_key", LIST_KEY, 2),
        ("pass", PASS, 2),
        ("fused_replacement", FUSED_REPLACEMENT, 2),
        ("command", COMMAND, 2),
        ("fold_fact", FOLD_FACT, 0),
        ("precision", PRECISION, 4),
        ("category", CATEGORY, 3),
        ("repair", REPAIR, 1),
        ("reason", REASON, 1),
    ],
)
def test_it_takes_few_files_of_code(patch: str, script: str, files: int, tmp_path: Path) -> None:
    for folder in ("autocastfx", "op_lists"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = PATCHES / f"{patch}.patch"
    touched = [line.split(" b/")[1] for line in path.read_text("utf-8").splitlines() if line.startswith("diff --git")]
    assert len([name for name in touched if name.endswith(".py")]) <= files
    subprocess.run(["git", "apply", str(path)], cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    where = "import autocastfx, pathlib; assert pathlib.Path.cwd() in pathlib.Path(autocastfx.__file__).parents\n"
    ran = subprocess.run(
        [sys.executable, "-c", where + script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to apply a patch")
@pytest.mark.parametrize("patch", sorted(path.name for path in PATCHES.glob("*.patch")))
def test_it_applies(patch: str) -> None:
    subprocess.run(["git", "apply", "--check", str(PATCHES / patch)], cwd=ROOT, check=True)
