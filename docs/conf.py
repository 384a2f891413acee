"""Sphinx configuration. Build with `make docs`; a warning is an error there."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

project = "autocastfx"
author = "The autocastfx contributors"
copyright = author
release = installed_version("autocastfx")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"autocastfx {release}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# Packages that integrations import; not every environment that builds the documentation has them.
autodoc_mock_imports = ["accelerate", "lightning", "onnx", "onnx_ir", "onnxruntime", "onnxscript"]

REPOSITORY = Path(__file__).resolve().parent.parent
# Files of the repository's root that are pages here; links to them stay inside the documentation.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
MARKDOWN_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def link_from_docs(match: re.Match[str]) -> str:
    """Make a link relative to the repository's root relative to docs/; of a link to a folder, keep the text."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if (REPOSITORY / target).is_dir():
        return text
    if target.startswith("docs/"):
        page = target.removeprefix("docs/")
    else:
        page = PAGES.get(target, f"../{target}")
    return f"[{text}]({page}{anchor})"


def include_root_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace `% include-root: NAME` by that file of the repository's root, its links adapted.

    A missing file gives nothing. MyST's own include adapts only links below one folder, and fails where the file is
    missing.
    """

    def text_of(match: re.Match[str]) -> str:
        path = REPOSITORY / match[1]
        if not path.is_file():
            return ""
        app.env.note_dependency(str(path))
        return MARKDOWN_LINK.sub(link_from_docs, path.read_text(encoding="utf-8"))

    source[0] = re.sub(r"^% include-root: (\S+)$", text_of, source[0], flags=re.MULTILINE)


def offer_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make a link to a Markdown file that is no page here one to the file itself; MyST takes other files for that."""
    source[0] = re.sub(r"\]\((\.\./[^)#\s]+\.md)\)", r"](path:\1)", source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", include_root_files)
    app.connect("source-read", offer_files)
