"""The documentation's tables and pictures are those of the results that are kept."""

from __future__ import annotations

import json
import re
import shutil
from datetime import date
from html import unescape
from pathlib import Path

import pytest

from benchmarks import machine, report
from benchmarks.gpu import rows
from benchmarks.training import DEFAULT

IMAGES = report.IMAGES


def _texts(svg: str) -> list[str]:
    """What can be read in a picture, its description first."""
    return [unescape(text) for text in re.findall(r"<(?:dc:description|text)[^>]*>([^<]*)</", svg)]


_KNOWN = all(map(machine.day_of, {row["commit"] for row in rows.read(rows.RESULTS) if "commit" in row}))
_with_history = pytest.mark.skipif(not _KNOWN, reason="git does not know the commits that rows were measured at")


@_with_history
def test_tables_and_pictures_belong_to_the_results_that_are_kept() -> None:
    assert report.stale() == [], "run `python -m benchmarks.report` and review what changed"


@_with_history
def test_each_result_has_a_table_and_each_picture_is_on_a_page() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (report.RESULTS / "tables").iterdir()}
    assert kept == report.tables()
    assert {f"{name.removesuffix('.json')}.txt" for name in report.TABLES} | {"gpu.md"} == kept.keys()
    assert {path.name for path in report.PAGES} >= {"README.md", "benchmarks.md"}
    pages = "".join(page.read_text(encoding="utf-8") for page in report.DOCS.glob("*.md"))
    shown = re.findall(r"!\[([^\]]*)\]\(images/([\w-]+\.\w+)\)", pages)
    assert sorted({name for _, name in shown if name.endswith(".svg")}) == sorted(report.shown())
    assert sorted({name for _, name in shown if name.endswith(".png")}) == sorted(p.name for p in IMAGES.glob("*.png"))
    assert all(len(alt) > 50 for alt, _ in shown), "who cannot see it reads what it shows"


def test_figures_of_the_conclusions_stand_in_the_tables() -> None:
    tables = "".join(report.tables().values()) + (report.RESULTS / "answered.md").read_text(encoding="utf-8")
    text = (report.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    text = re.sub(r"\n### Estimated\n.*?(?=\n## )", "", text, flags=re.DOTALL)  # which no row has
    figures = re.findall(r"\b\d+\.\d+\b", text)
    assert len(figures) > 30
    assert {figure for figure in figures if not re.search(rf"\b{re.escape(figure)}", tables)} == set()


def test_each_result_says_where_and_when_it_was_measured() -> None:
    for path in report.RESULTS.glob("*.json"):
        held = json.loads(path.read_text(encoding="utf-8"))
        assert {"device", "torch"} <= held.keys(), path.name
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", held["commit"]), path.name
        assert date.fromisoformat(held["date"]), path.name


@_with_history
def test_what_is_stale_is_told_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("RESULTS", "DOCS", "IMAGES"):
        shutil.copytree(getattr(report, name), tmp_path / name, ignore=shutil.ignore_patterns("_build", "*.png"))
        monkeypatch.setattr(report, name, tmp_path / name)
    shutil.copy(report.README, tmp_path / "DOCS")
    monkeypatch.setattr(report, "PAGES", tuple(tmp_path / "DOCS" / page.name for page in report.PAGES))
    assert report.stale() == []
    results = tmp_path / "RESULTS" / "memory.json"
    held = json.loads(results.read_text())
    held["rows"][2]["activations"] //= 2
    results.write_text(json.dumps(held))
    (tmp_path / "IMAGES" / "placement.svg").unlink()
    (results.parent / "tables" / "vocabulary-cpu.txt").unlink()
    assert report.stale() == ["memory.txt", "vocabulary-cpu.txt", "memory.svg", "placement.svg"]
    assert report.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "memory.txt: written",
        "vocabulary-cpu.txt: written",
        "memory.svg: written",
        "placement.svg: written",
    ]
    assert report.stale() == []
    assert report.main() == 0
    assert capsys.readouterr().out == ""


def test_what_a_gpu_measured_becomes_tables_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pages = tuple(shutil.copy(page, tmp_path) for page in report.PAGES)
    for name, value in {"RESULTS": tmp_path, "IMAGES": tmp_path, "DOCS": tmp_path}.items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(report, "PAGES", tuple(map(Path, pages)))
    monkeypatch.setattr(report, "_TABLE", re.compile("(?!)"))
    monkeypatch.setattr(report, "PICTURES", {"gpu-step.svg": report.PICTURES["gpu-step.svg"]})
    assert report.main() == 0
    with_steps = [tmp_path / "README.md", tmp_path / "benchmarks.md"]
    assert all(report.NO_GPU in page.read_text(encoding="utf-8") for page in with_steps)
    assert report.tables() == {}
    (tmp_path / "gpu").mkdir()
    environment = {"device": "H100", "torch": "2.11.0+cu130", "commit": "abc", "date": "2026-01-01 12:00 UTC"}
    rows.append(tmp_path / "gpu", {"card": "H100", "stage": "environment", "model": "environment", **environment})
    for side, ratio in (("torch.autocast", 1.0), (DEFAULT, 0.875)):
        row = {"stage": "eager step, BERT", "model": "BERT", "dtype": "float16", "side": side, "step_ms": 8.5}
        rows.append(tmp_path / "gpu", {"card": "H100", **row, "step_to_autocast": [0.5, ratio, 1.5]})
    assert report.stale() == ["README.md", "benchmarks.md", "gpu.md", "gpu-step.svg"]
    assert report.main() == 0
    assert report.stale() == []
    for page in (*with_steps, tmp_path / "tables" / "gpu.md"):
        text = page.read_text(encoding="utf-8")
        assert report.NO_GPU not in text
        assert "H100; torch 2.11.0+cu130, commit abc; 2026-01-01.\n" in text
        assert ("\n| BERT | float16 | 0.88 (0.50 to 1.50) |\n" in text) == (page.name == "README.md")
        assert (f"\n| BERT | float16 | {DEFAULT} | 8.5 | 0.875 (0.500 to 1.500) |\n" in text) == (page.name == "gpu.md")
        assert ("images/gpu-step.svg" in text) == (page.name == "benchmarks.md")
    texts = _texts((tmp_path / "gpu-step.svg").read_text(encoding="utf-8"))
    assert {"BERT, float16", "training step, time, H100", DEFAULT} <= set(texts)


@pytest.mark.parametrize("name", report.shown())
def test_a_picture_is_the_same_each_time(name: str) -> None:
    pytest.importorskip("matplotlib")
    svg = report.drawn(name)
    assert svg == report.drawn(name)
    assert _texts(svg)[0] == report.described(name)


def test_what_is_beyond_an_axis_is_a_number() -> None:
    pytest.importorskip("matplotlib")
    points = {"first": {"a": 0.5, "b": (0.9, 1.0, 1.25)}, "second": {"a": 33.54, "b": 2.0}}
    looks = dict(zip(points, (report.Look("#0072B2", "o"), report.Look("#D55E00", "D")), strict=True))
    figure = report._dots([report.Dots("bytes", "other's", points)], looks, 6)
    (axis,) = figure.axes
    assert axis.get_xlim()[0] < 0.5 < 2.0 < axis.get_xlim()[1] < 33
    texts = _texts(report.svg(figure, "described"))
    assert texts[0] == "described"
    assert "33.5 →" in texts
    assert {"a", "b", "bytes", "times other's", "first", "second"} <= set(texts)


def test_every_command_that_is_named_exists() -> None:
    """Those of questions that are answered are gone."""
    root = report.README.parent
    sources = (path for folder in ("autocastfx", "benchmarks", "tests") for path in (root / folder).rglob("*.py"))
    pages = [*root.glob("*.md"), *report.DOCS.glob("*.md"), *sources]
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    named = set(re.findall(r"python -m benchmarks\.([a-z_0-9]+(?:\.[a-z_0-9]+)?)", text))
    assert len(named) > 20
    files = {name: root / "benchmarks" / name.replace(".", "/") for name in named}
    assert [n for n, f in files.items() if not (f.with_suffix(".py").exists() or (f / "__main__.py").exists())] == []
