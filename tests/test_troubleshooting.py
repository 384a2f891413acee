"""docs/troubleshooting.md quotes messages as they are, and leaves out no error or warning that a user may meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import autocastfx
from autocastfx import errors

PACKAGE = Path(autocastfx.__file__).parent
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.+?) \| .+ \| .+ \|$", TEXT, re.MULTILINE)
QUOTED = [quoted for row in ROWS for quoted in re.findall(r"`([^`]+)`", row) if " " in quoted]
# Those of tools that are asked for by name, whose own pages say what to do.
OF_TOOLS = {"BisectError", "CalibrationError", "EvaluationsError", "GpuError", "MissingExtraError", "ModelSpecError"}


def messages() -> Iterator[str]:
    """Texts in the package, with a tab in the place of each value; not docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(_part(part) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                yield node.value


def _part(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "\t"


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n\n".join(messages())


def found(quoted: str, texts: str) -> bool:
    """True if the words between the ``…`` stand in one message, in this order, with values between them."""
    parts = [re.escape(part.strip(" ")) for part in quoted.split("…")]
    return re.search(r"[^\n]*?\t[^\n]*?".join(parts), texts) is not None


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_that_is_quoted_is_one_of_the_package(quoted: str, texts: str) -> None:
    said = re.split(r"(?<=…)\. ", quoted)  # sentences that follow on each other, of several texts
    assert all(found(one, texts) for one in said), "the message was reworded: reword the page too"


def test_a_reworded_message_would_be_seen(texts: str) -> None:
    assert len(QUOTED) > 40
    assert not found("the model uses activation checkpoints", texts)
    assert not found("hooks on … ran since the model was captured.", texts)
    assert not found("Verify that all is well", texts)


def test_every_error_and_warning_is_there() -> None:
    kinds = {name for name in vars(errors) if name.endswith(("Error", "Warning")) and name[0] != "_"} - {
        "AutocastFXError"
    }
    assert {name for name in kinds if f"`{name}`" not in TEXT} == OF_TOOLS
