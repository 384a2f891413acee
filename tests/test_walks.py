"""The ways through the code in CONTRIBUTING lead through the files that they name; from a rule to its cast are nine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx, nn

import autocastfx
from autocastfx.plan.plan import Decision, Placement
from autocastfx.policy.rule import Rule

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autocastfx"
_FILES = f"{PACKAGE}{os.sep}"
MOST = 9  # files from a rule to its cast
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))

Trace = Callable[[str, FrameType, Any], None]


def traced(act: Callable[[], object], trace: Trace) -> None:
    """Act, and show each call of the package's functions and each result: its file, frame and result."""

    def show(frame: FrameType, event: str, result: Any) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "return") and name.startswith(_FILES):
            trace(Path(name[len(_FILES) :]).with_suffix("").as_posix(), frame, result)

    sys.setprofile(show)
    try:
        act()
    finally:
        sys.setprofile(None)


def convert(**options: Any) -> nn.Module:
    return autocastfx.convert(nn.Sequential(nn.Linear(16, 16)), X, dtype="float16", **options)


def test_from_a_rule_to_its_cast_at_most_nine_files_are_read() -> None:
    """Of one linear layer: its rule is read, matched, decided, placed, and its input cast."""
    files = dict[str, set[str]]()

    def note(file: str, frame: FrameType, result: Any) -> None:
        if not frame.f_code.co_name.startswith("<"):  # what another function maps
            for step in steps(result):
                files.setdefault(file, set()).add(step)

    traced(lambda: convert(check=False), note)
    assert {"Rule", "Decision", "Placement", "cast"} == set[str]().union(*files.values())
    assert len(files) <= MOST, files


def steps(result: Any) -> Iterator[str]:
    """Name what of the way a result is, or gives for nodes."""
    for value in result.values() if isinstance(result, Mapping) else [result]:
        if isinstance(value, (Decision, Placement)) or (isinstance(value, Rule) and "linear" in value.ops):
            yield type(value).__name__
        elif isinstance(value, fx.Node) and value.target is torch.ops.aten.to.dtype:
            yield "cast"


def explain_a_line(folder: Path) -> None:
    (folder / "mine.yaml").write_text("deny:\n  - gelu: {reason: mine}\n", encoding="utf-8")
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    amp_model = autocastfx.convert(model, X, op_list=["default", folder / "mine.yaml"], dtype="float16")
    assert "mine.yaml" in autocastfx.explain(amp_model, "gelu")


def call_for_more_rows(folder: Path) -> None:
    amp_model = convert(check=False)
    assert amp_model(X.repeat(2, 1)).shape == torch.func.vmap(amp_model)(X[None]).repeat(1, 2, 1)[0].shape


def overflow(folder: Path) -> None:
    amp_model = convert(check=False)
    optimizer = autocastfx.LossScalingOptimizer(torch.optim.SGD(amp_model.parameters(), lr=1.0))
    optimizer.backward(amp_model(X).sum() * float("inf"))
    optimizer.step()
    assert optimizer.last_step.skipped


WALKS: dict[str, Callable[[Path], object]] = {
    "A line of an op list, from the file to the printed reason": explain_a_line,
    "`convert`": lambda _: convert(),
    "A call of the converted model": call_for_more_rows,
    "A step that overflows": overflow,
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_way_through_the_code_leads_through_the_files_that_it_names(walk: str, tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f". **{walk}.**")
    words = re.split(r"\n\d\. |\n\n", rest)[0]
    named = {file for file in re.findall(r"`([a-z0-9_/]+)`", words) if (PACKAGE / f"{file}.py").is_file()}
    entered = set[str]()
    traced(lambda: WALKS[walk](tmp_path), lambda file, frame, result: entered.add(file))
    assert len(named) > 3
    assert named <= entered, named - entered
    assert set(re.findall(r"`([a-z0-9_]+/[a-z0-9_/]+)`", words)) <= named, "no such file"


def test_there_are_four_ways() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"^\d\. \*\*(.+?)\.\*\*", text, re.MULTILINE) == [*WALKS]
