"""Apply and run patches that add a list key, a pass, a fused replacement, a command and a fold fact."""

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


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to apply a patch")
@pytest.mark.parametrize(
    ("patch", "script", "files"),
    [
        ("list_key", LIST_KEY, 2),
        ("pass", PASS, 2),
        ("fused_replacement", FUSED_REPLACEMENT, 2),
        ("command", COMMAND, 2),
        ("fold_fact", FOLD_FACT, 0),
    ],
    ids=["list key", "pass", "fused replacement", "command", "fold fact"],
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
