"""Run the code of README.md and of pages in docs.

Python blocks run in order, as one module, ``my_model``, in a file ``my_model.py`` that holds all of them joined. A YAML
block is written to the file that the text before it names last. A ``text`` block right after a Python block is what
that block prints.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torch._dynamo.symbolic_convert import _import_module

README = Path(__file__).resolve().parents[2] / "README.md"
OP_LISTS = README.parent / "docs" / "op-lists.md"
FLOAT8 = README.parent / "docs" / "float8.md"
PAGE = README.parent / "docs" / "page.md"
NUMERICS = README.parent / "docs" / "numerics.md"
WHEN_TO_USE = README.parent / "docs" / "when-to-use.md"
TUTORIAL = README.parent / "docs" / "tutorial.md"
HOW_TO = README.parent / "docs" / "how-to.md"
PLACEMENT = README.parent / "docs" / "placement.md"
INTEGRATIONS = README.parent / "docs" / "integrations.md"
CONVERTED_MODEL = README.parent / "docs" / "converted-model.md"
TUNING = README.parent / "docs" / "tuning.md"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w./]+\.yaml)`")
_NEED_MORE = re.compile(r"^## (?:Trainers|ONNX)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, where that starts and ends, and the prose between it and the last one."""

    language: str
    text: str
    start: int
    end: int
    before: str


def blocks(markdown: str) -> list[Block]:
    """All fenced blocks with a language, in order."""
    found: list[Block] = []
    last = 0
    for match in _BLOCK.finditer(markdown):
        found.append(Block(match[1], match[2], match.start(2), match.end(2), markdown[last : match.start()]))
        last = match.end()
    return found


def section(markdown: str, title: str) -> str:
    """The section under ``## title``, with its subsections.

    :raises ValueError: where there is none.
    """
    for part in re.split(r"^(?=## )", markdown, flags=re.MULTILINE):
        if part.startswith(f"## {title}\n"):
            return part
    raise ValueError(f"no section {title!r}")


def without_further_packages(markdown: str) -> str:
    """``markdown`` up to the first section whose code needs packages that only ``make integrations`` installs."""
    found = _NEED_MORE.search(markdown)
    return markdown[: found.start()] if found else markdown


def outputs(markdown: str) -> Iterator[tuple[Block, Block]]:
    """Each Python block that is followed by its output, with that."""
    found = blocks(markdown)
    for code, shown in pairwise(found):
        if code.language == "python" and shown.language == "text" and not shown.before.strip():
            yield code, shown


def run(markdown: str, folder: Path) -> dict[int, str]:
    """Run the blocks with ``folder`` as the working directory.

    Returns what each Python block printed, by where its text starts.
    """
    module = types.ModuleType("my_model")
    name, lines = "my_model.py", list[str]()
    printed: dict[int, str] = {}
    with _inside(folder), _imported(module):
        for block in blocks(markdown):
            if block.language == "yaml":
                Path(_FILE.findall(block.before)[-1]).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                code = "\n" * len(lines) + block.text
                lines += block.text.splitlines(keepends=True)
                linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(code, name, "exec"), module.__dict__)
                printed[block.start] = out.getvalue()
    return printed


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _imported(module: types.ModuleType) -> Iterator[None]:
    """While open, ``module`` can be imported: what it defines has a dotted path."""
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        _import_module.cache_clear()  # Dynamo's, which knows modules by their names


def updated(markdown: str, printed: Mapping[int, str]) -> str:
    """``markdown`` with what was printed in place of the outputs that it claims."""
    for code, shown in reversed(list(outputs(markdown))):
        markdown = markdown[: shown.start] + printed[code.start] + markdown[shown.end :]
    return markdown
