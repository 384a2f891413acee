"""Metadata that a build fills in where it knows the repository's address, ``AUTOCASTFX_REPOSITORY``.

The package index shows the README apart from the repository: its links become absolute, and the project has its URLs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Repository": "",
    "Documentation": "/tree/{tag}/docs",
    "Changelog": "/blob/{tag}/CHANGELOG.md",
    "Issues": "/issues",
}


class RepositoryHook(MetadataHookInterface):
    """Gives the metadata ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what is there for this address and version; without an address, the README as it is."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address := os.environ.get("AUTOCASTFX_REPOSITORY", "").rstrip("/"):
            tag = f"v{metadata['version']}"
            text = re.sub(r"\]\((?!https?:|#)(\S+?\.png)\)", rf"]({address}/raw/{tag}/\1)", text)
            text = re.sub(r"\]\((?!https?:|#)(\S+?)\)", rf"]({address}/blob/{tag}/\1)", text)
            metadata["urls"] = {name: address + path.format(tag=tag) for name, path in PAGES.items()}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
