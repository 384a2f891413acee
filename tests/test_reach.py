"""The benchmark of reach judges what runs right, what is told, and what is silent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import reach
from benchmarks.models.hand import HAND
from benchmarks.models.zoo import ZooModel, generator
from benchmarks.store import Store
from tests.integrations.test_skipped_code import Experts

ROOT = Path(__file__).resolve().parents[1]
CLASSIFIED = next(case for case in HAND if case.name == "classified")


pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", reach.WAYS)
def test_a_model_that_runs_right(way: str) -> None:
    row = reach.measure(CLASSIFIED, "hand", way)
    assert row is not None
    assert (row.verdict, row.reason, row.graphs) == ("right", "", 2)
    assert 0 < row.ours <= 2 * row.autocast + torch.finfo(torch.bfloat16).eps


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, calls = reach._ran, list[tuple[object, ...]]()

    def wrong(*args: object) -> reach._Ran:
        calls.append(args)
        found = ran(*args)  # type: ignore[arg-type]
        is_ours = len(calls) % 3 == 0  # after float32's and torch.autocast's
        return found if not is_ours else reach._Ran(found.outputs, 1.1 * found.gradients, found.products)

    monkeypatch.setattr(reach, "_ran", wrong)
    row = reach.measure(CLASSIFIED, "hand", "convert")
    assert row is not None
    assert row.verdict == "apart"


def _experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


def _inputs(batch: int, size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch * size, 8, generator=generator(batch, size))}


def test_code_that_is_not_captured_is_told() -> None:
    row = reach.measure(ZooModel("experts", _experts, _inputs), "hand", "backend")
    assert row is not None
    assert row.verdict == "partly"
    assert row.reason.startswith("forward at tests/integrations/test_skipped_code.py:")


def test_what_float32_does_not_run_is_left_out_and_errors_are_told() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("no")

    assert reach.measure(ZooModel("fails", Fails, _inputs), "hand", "convert") is None
    row = reach.measure(ZooModel("experts", _experts, _inputs), "hand", "convert")
    assert row is not None
    assert row.verdict == "refused"
    assert "cannot be captured" in row.reason


def test_the_command_keeps_rows_and_fails_for_a_silent_case(tmp_path: Path) -> None:
    """In a process of its own: it forks, which torch refuses where earlier tests have started autograd's threads."""
    arguments = ["--kind", "hand", "--cases", "classified", "--json", str(tmp_path / "rows.json")]
    held = reach.Row("classified", "hand", "convert", "right", 0.1, 0.1, 2, 1.0)
    Store(tmp_path / "rows.json", reach.Row, {"transformers": version("transformers")}).extend([held])
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.reach", *arguments],
        **{"env": {**os.environ, "AUTOCASTFX_DISABLE": "1"}, "cwd": ROOT, "capture_output": True, "text": True},
    )
    assert ran.returncode == 1, ran.stderr
    assert "classified               backend  silent" in ran.stdout
    assert "classified               convert" not in ran.stdout, "it is known from before"


def test_the_rows_that_are_kept_are_right_or_told() -> None:
    held = json.loads((reach.RESULTS / "reach-cpu.json").read_text(encoding="utf-8"))
    rows = [reach.Row(**row) for row in held["rows"]]
    assert {row.verdict for row in rows} <= {"right", "partly", "refused"}
    cases = {(row.case, row.kind) for row in rows}
    assert len(cases) * 2 == len(rows)
    assert {(row.case, row.kind) for row in rows if row.verdict in reach.GOOD} == cases
    assert not any(re.search(r"(^|[\s\"(])/\w", row.reason) for row in rows), "no row names a folder of the machine"
