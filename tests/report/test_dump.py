from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import Plan
from autocastfx.errors import NotCapturedError
from tests.decided import decided
from tests.golden.models import CASES, INPUTS, converted
from tests.report.shown import in_both_modes

FORMATS = ("text", "json", "dot", "graphml", "python", "html")


@pytest.mark.parametrize("format", FORMATS)
def test_the_file_holds_what_is_returned(tmp_path: Path, format: str) -> None:
    target = tmp_path / "dump.out"
    text = autocastfx.dump(converted("cnn"), target, format)
    assert text.endswith("\n")
    assert target.read_bytes().decode() == text
    assert os.listdir(tmp_path) == ["dump.out"]


def test_a_path_may_be_a_string_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = autocastfx.dump(converted("cnn"), "dump.txt")
    assert Path("dump.txt").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", [format for format in FORMATS if format != "html"])
def test_an_unpickled_model_gives_the_same_after_a_call(name: str, format: str) -> None:
    amp_model = converted(name)
    unpickled = pickle.loads(pickle.dumps(amp_model))
    with pytest.raises(NotCapturedError, match="call the model once, or give convert example inputs"):
        autocastfx.dump(unpickled, format=format)
    unpickled(*INPUTS[name])
    assert autocastfx.dump(unpickled, format=format) == autocastfx.dump(amp_model, format=format)


@pytest.mark.parametrize("name", CASES)
def test_json_is_the_plan(name: str) -> None:
    amp_model = converted(name)
    assert Plan.from_json(autocastfx.dump(amp_model, format="json")) == amp_model.plan


def test_the_mode_chooses_the_variant() -> None:
    amp_model = in_both_modes(CASES["encoder_layer"](), *INPUTS["encoder_layer"])
    trained = autocastfx.dump(amp_model)
    evaluated = autocastfx.dump(amp_model.eval())
    assert "variant: 1 of 2, train mode," in trained
    assert "variant: 2 of 2, eval mode," in evaluated
    assert " dropout " in trained
    assert " dropout " not in evaluated


def test_the_model_is_left_alone() -> None:
    amp_model = converted("no_grad")
    before = (str(amp_model.graph), amp_model.plan, amp_model.code)
    for format in FORMATS:
        autocastfx.dump(amp_model, format=format)
    assert (str(amp_model.graph), amp_model.plan, amp_model.code) == before


def test_an_unknown_format_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format is 'text', 'json', 'dot', 'graphml', 'python', 'html', not 'pdf'"):
        autocastfx.dump(converted("cnn"), tmp_path / "dump.pdf", "pdf")
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=f"the folder {folder} does not exist; create it first"):
        autocastfx.dump(converted("cnn"), folder / "dump.txt")
    assert not folder.exists()


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        autocastfx.dump(converted("cnn"), tmp_path / "taken")
    assert os.listdir(tmp_path) == ["taken"]


def test_a_model_that_is_not_converted_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"dump shows what convert\(\) returned, or what enable\(\) was given, not a Linear"
    ):
        autocastfx.dump(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(("a.txt", "text"), ("a", "text"), ("a.json", "json"), ("a.dot", "dot"), ("a.gv", "dot")),
        *(("a.graphml", "graphml"), ("a.py", "python"), ("a.HTML", "html"), ("a.htm", "html")),
    ],
)
def test_the_suffix_chooses_the_format_unless_one_is_given(name: str, format: str, tmp_path: Path) -> None:
    amp_model = autocastfx.convert(nn.Linear(8, 8), torch.randn(2, 8), dtype=torch.bfloat16, check=False)
    expected = autocastfx.dump(amp_model, format=format)
    assert autocastfx.dump(amp_model, tmp_path / name) == expected
    assert (tmp_path / name).read_text(encoding="utf-8") == expected
    assert autocastfx.dump(amp_model, tmp_path / name, "text") == autocastfx.dump(amp_model)


def test_a_plan_as_text_is_its_summary() -> None:
    amp_model = decided(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), torch.randn(2, 8), dtype="bf16")
    told = "bfloat16 on cpu, op list bfloat16; nodes: 1 in bfloat16, 1 in float32; casts: 3"
    assert str(amp_model.plan) == told
    assert "PlannedNode(" in repr(amp_model.plan)


def test_a_prompt_shows_what_was_written_as_one_line(tmp_path: Path) -> None:
    amp_model, path = converted("cnn"), tmp_path / "page.htm"
    written = autocastfx.dump(amp_model, path)
    assert repr(written) == f"<dump of {len(written):,} characters, in {path}>"
    assert repr(autocastfx.dump(amp_model, format="html")) == f"<dump of {len(written):,} characters, print() shows it>"
    assert str(written) == written == path.read_text(encoding="utf-8")
    assert f"{written}" == written
    copied = pickle.loads(pickle.dumps(written))
    assert (copied, repr(copied)) == (written, repr(written))
    text = autocastfx.dump(amp_model)
    assert repr(text) == repr(str(text)), "text that stands in no file is shown as it is"
