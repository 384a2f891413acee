"""What the package index shows: the README with absolute links and the project's URLs, where the address is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

core: Any = pytest.importorskip("hatchling.metadata.core")
manager: Any = pytest.importorskip("hatchling.plugin.manager")

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/team/autocastfx"


def metadata() -> Any:
    return core.ProjectMetadata(str(ROOT), manager.PluginManager()).core


def test_without_an_address_the_readme_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOCASTFX_REPOSITORY", raising=False)
    found = metadata()
    assert found.readme == (ROOT / "README.md").read_text(encoding="utf-8")
    assert found.urls == {}


def test_with_an_address_every_link_leads_to_a_file_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCASTFX_REPOSITORY", f"{ADDRESS}/")
    found = metadata()
    links = re.findall(r"\]\(([^)#]\S*?)\)", found.readme)
    assert links
    assert all(link.startswith("https://") for link in links)
    ours = [re.fullmatch(rf"{ADDRESS}/(blob|raw)/v{found.version}/([^#]+)(#.*)?", link) for link in links]
    files = [(one[1], one[2]) for one in ours if one is not None]
    assert all((ROOT / path).exists() for _, path in files)
    assert {path.endswith(".png") for kind, path in files if kind == "raw"} == {True}
    assert set(found.urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(ADDRESS) for url in found.urls.values())
