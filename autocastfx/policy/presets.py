"""Find the op lists shipped with this package."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from autocastfx.errors import OpListError
from autocastfx.policy.yaml_tree import nearest

__all__ = ["preset_folder", "preset_path", "preset_title", "presets"]


def preset_folder() -> Path:
    """Return the folder of the shipped lists: inside the package (a wheel), else beside it (a checkout)."""
    inside = Path(__file__).parents[1] / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "op_lists"


def presets() -> tuple[str, ...]:
    """Return the names of the shipped lists. ``"default"`` stands for the one named after the conversion's dtype."""
    return tuple(sorted(p.stem for p in preset_folder().glob("*.yaml") if p.stem != "kernel_facts"))


def preset_path(name: str) -> Path:
    """Return the path of a shipped list.

    Raises:
        OpListError: no shipped list has this name.
    """
    path = preset_folder() / f"{name}.yaml"
    if name not in presets():
        hint = nearest(name, presets())
        if name == "default":
            hint = ": in op_list=['default', FILE] it stands for the list of the dtype, and FILE needs no 'extends'"
        raise OpListError(f"no preset is named {name!r}{hint}. Presets: {', '.join(presets())}; a path ends in .yaml.")
    return path


def preset_title(name: str) -> str:
    """Return what a shipped list is: the first sentence of its file.

    Raises:
        OpListError: no shipped list has this name.
    """
    comment = takewhile(lambda line: line.startswith("#"), preset_path(name).read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in comment).partition(". ")[0].rstrip(".")
