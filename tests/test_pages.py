"""The code of pages without tests of their own runs, and prints what is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autocastfx
from tests.golden.readme import blocks, outputs, run

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (
    "tutorial",
    "how-to",
    "page",
    "training",
    "migrate",
    "converted-model",
    "when-to-use",
)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_prints_what_is_shown(page: str, tmp_path: Path) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    shown = list(outputs(text))
    assert len(shown) == sum(block.language == "text" for block in blocks(text)) > 0
    printed = run(text, tmp_path)
    for code, output in shown:
        assert printed[code.start] == output.text
    assert {start for start, out in printed.items() if out} == {code.start for code, _ in shown}


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_in_the_table_of_contents_and_name_examples_that_exist(page: str) -> None:
    assert page in (DOCS / "index.md").read_text(encoding="utf-8").split()
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for example in re.findall(r"`(examples/\w+\.py)`", text):
        assert (DOCS.parent / example).is_file(), example
    for target in re.findall(r"\]\((\w[\w-]+\.md)", text):
        assert (DOCS / target).is_file(), target


@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_the_loop_that_moves_from_autocast_train(side: str) -> None:
    (loop,) = re.findall(r"```diff\n(.*?)```", (DOCS / "migrate.md").read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(line[1:] for line in loop.splitlines() if line[0] in {side, " "}).replace('"cuda"', '"cpu"')
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(256, 16)
    labels = x[:, :4].argmax(1)

    def loss_now() -> Tensor:
        return cross_entropy(model(x), labels).detach()

    names = {"torch": torch, "autocastfx": autocastfx, "cross_entropy": cross_entropy, "model": model}
    before = loss_now()
    exec(code, {**names, "example": x[:32], "batches": list(zip(x.split(32), labels.split(32), strict=True)) * 8})
    assert loss_now() < 0.9 * before
