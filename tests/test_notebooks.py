"""The notebooks in ``examples/`` run from the first cell to the last, and each cell's value shows in short."""

from __future__ import annotations

import ast
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))


def run_cell(source: str, namespace: dict[str, Any], name: str) -> Any:
    """Run a cell, and return the value of its last line if that is an expression, as Jupyter does."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace) if isinstance(last, ast.Expr) else None


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = list[Any]()
    torch._dynamo.reset()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "figures in a file go out of date"
            shown.append(run_cell("".join(cell["source"]), namespace, f"{path.name}:{cell['id']}"))
    torch._dynamo.reset()
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) >= 6
    for page in pages:
        HTMLParser().feed(page)
    assert "why: category, [note]" in capsys.readouterr().out
