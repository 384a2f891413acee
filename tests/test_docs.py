"""The code of pages in docs runs and prints what is shown; docs/op-lists.md names every device and preset."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autocastfx import load_op_list, presets
from autocastfx.policy.read_rules import DEVICES
from tests.golden.readme import (
    FLOAT8,
    INTEGRATIONS,
    NUMERICS,
    OP_LISTS,
    PLACEMENT,
    TUNING,
    outputs,
    run,
    without_further_packages,
)

TEXT = OP_LISTS.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[int, str]:
    return run(TEXT, folder)


def test_the_code_prints_what_is_shown(printed: dict[int, str]) -> None:
    shown = list(outputs(TEXT))
    assert len(shown) == TEXT.count("```text\n")
    for code, output in shown:
        assert printed[code.start] == output.text, "run `python -m tests.golden` and review what changed"
    assert {start for start, text in printed.items() if text} == {code.start for code, _ in shown}


@pytest.mark.usefixtures("printed")
def test_the_lists_shown_are_right(folder: Path) -> None:
    lists = {path.stem: load_op_list(path) for path in folder.glob("*.yaml") if path.stem != "wrong"}
    assert set(lists) == {"mine", "conditions", "demands", "modules", "more"}
    assert len(lists["conditions"].lines) == len(load_op_list("bfloat16").lines) + 4


@pytest.mark.parametrize("page", [FLOAT8, NUMERICS, TUNING, PLACEMENT, INTEGRATIONS], ids=lambda page: page.stem)
def test_the_code_of_further_pages_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    text = without_further_packages(page.read_text(encoding="utf-8"))
    printed = {start: said for start, said in run(text, tmp_path).items() if said}
    shown = {code.start: output.text for code, output in outputs(text)}
    assert {start: _ERROR.sub("?", said) for start, said in shown.items()} == {
        start: _ERROR.sub("?", said) for start, said in printed.items()
    }
    for start, said in shown.items():
        errors = [[float(number) for number in _ERROR.findall(one)] for one in (said, printed[start])]
        assert errors[0] == pytest.approx(errors[1], rel=0.1)


# A rounding error, whose last digit depends on the order in which a processor's kernels add up.
_ERROR = re.compile(r"\b\d\.\d\d?e-\d\d\b")


def test_every_device_and_preset_is_named() -> None:
    assert set(DEVICES) <= set(re.findall(r"`(\w+)`", TEXT))
    table = TEXT.partition("## Presets")[2].partition("###")[0]
    assert set(presets()) <= set(re.findall(r"`(\w+)`", table))
