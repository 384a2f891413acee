"""The code of README.md runs and prints what is shown. ``python -m tests.golden`` writes the outputs anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autocastfx import presets
from autocastfx.policy.op_list import preset_folder
from autocastfx.policy.rule import Category
from tests.golden.readme import README, blocks, outputs, run, updated

TEXT = README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[int, str]:
    return run(TEXT, folder)


def test_the_code_prints_what_is_shown(printed: dict[int, str]) -> None:
    shown = list(outputs(TEXT))
    assert len(shown) == TEXT.count("```text\n")
    for code, output in shown:
        assert printed[code.start] == output.text, "run `python -m tests.golden` and review what changed"


def test_what_is_not_shown_prints_nothing(printed: dict[int, str]) -> None:
    shown = {code.start for code, _ in outputs(TEXT)}
    assert {start for start, text in printed.items() if text} == shown


def test_updating_changes_nothing_else() -> None:
    stale = re.sub(r"```text\n.*?```", "```text\nstale\n```", TEXT, flags=re.DOTALL)
    fresh = {code.start: "fresh\n" for code, _ in outputs(stale)}
    assert updated(stale, fresh) == stale.replace("stale\n", "fresh\n")


def test_every_category_is_in_the_table() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TEXT.partition("## Op lists")[2], re.MULTILINE) == [str(c) for c in Category]


def test_every_list_and_link_exists() -> None:
    links = re.findall(r"\]\(((?!#|https?:)[^)]+)\)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link.partition("#")[0]).is_file()] == []
    assert {Path(link).stem for link in links if link.startswith("op_lists/")} == set(presets())
    assert preset_folder() == README.parent / "op_lists"


def test_every_command_is_a_target_of_the_makefile() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"\bmake ([\w-]+)", TEXT)
    assert {"demo", "test"} <= set(commands)
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)


@pytest.mark.usefixtures("printed")
def test_yaml_is_written_to_the_file_that_the_text_names(folder: Path) -> None:
    (block,) = (b for b in blocks(TEXT) if b.language == "yaml")
    assert (folder / "my_ops.yaml").read_text(encoding="utf-8") == block.text
