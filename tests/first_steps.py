"""``python -m tests.first_steps FOLDER`` goes the ways of four people through the pages that they would read.

A newcomer reads README.md and the tutorial; a practitioner, how to train by Trainer; a researcher, how to find faults
and to edit lists; an engineer who decides on adoption, what is decided and why, weights and sizes. Every Python block
runs, and what it prints is compared with what the page says. A browser opens the page of the model in README.md, and
one of the tutorial's planted fault. FOLDER gets the files, a transcript and the pictures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.browser import browser
from tests.golden.readme import (
    CONVERTED_MODEL,
    INTEGRATIONS,
    NUMERICS,
    OP_LISTS,
    PLACEMENT,
    README,
    TUNING,
    TUTORIAL,
    WHEN_TO_USE,
    outputs,
    run,
    section,
)

__all__ = ["WAYS", "Walk", "go", "main", "walk"]

FAULT = """

```python
autocastfx.dump(edited, "fault.html", comparison=autocastfx.compare(None, edited, readings))
```
"""


# A rounding error, whose last digits depend on the order in which a processor's kernels add up.
_ERROR = re.compile(r"\b\d\.\d\d?e-\d\d\b")
_CLOSE = 0.1


def _trainers() -> tuple[tuple[str, str], ...]:
    return (("integrations.md, Trainers", section(INTEGRATIONS.read_text(encoding="utf-8"), "Trainers")),)


def _pages(*pages: Path) -> Callable[[], tuple[tuple[str, str], ...]]:
    return lambda: tuple((page.name, page.read_text(encoding="utf-8")) for page in pages)


# By reader, but the newcomer: the pages' names and texts. The practitioner's need the packages of `make integrations`.
WAYS: Mapping[str, Callable[[], tuple[tuple[str, str], ...]]] = {
    "practitioner": _trainers,
    "researcher": _pages(OP_LISTS, NUMERICS, TUNING),
    "engineer": _pages(PLACEMENT, CONVERTED_MODEL, WHEN_TO_USE),
}


@dataclass(frozen=True)
class Walk:
    """A newcomer's way through the pages.

    Attributes:
        transcript: all that was printed.
        differing: what was printed otherwise than a page says.
        pages: the pages that were made, by the name of their picture.
    """

    transcript: str
    differing: tuple[str, ...]
    pages: dict[str, Path]


def go(pages: tuple[tuple[str, str], ...], folder: Path) -> Walk:
    """Run pages, given by name and text, in ``folder``."""
    printed: list[str] = []
    differing: list[str] = []
    for name, text in pages:
        found = run(text, folder)
        printed += [f"== {name}\n", *found.values()]
        differing += [
            found[code.start] for code, shown in outputs(text) if not _are_alike(found[code.start], shown.text)
        ]
    return Walk("".join(printed), tuple(differing), {})


def _are_alike(printed: str, shown: str) -> bool:
    """True for equal texts, apart from the last digits of rounding errors."""
    if _ERROR.sub("?", printed) != _ERROR.sub("?", shown):
        return False
    pairs = zip(_ERROR.findall(printed), _ERROR.findall(shown), strict=True)
    return all(abs(float(a) - float(b)) <= _CLOSE * float(b) for a, b in pairs)


def walk(folder: Path) -> Walk:
    """Go the newcomer's way in ``folder``: README.md and the tutorial."""
    texts = ((page.name, page.read_text(encoding="utf-8") + more) for page, more in ((README, ""), (TUTORIAL, FAULT)))
    went = go(tuple(texts), folder)
    pages = {"readme": folder / "model.html", "fault": folder / "fault.html"}
    return Walk(went.transcript, went.differing, pages)


def main(arguments: list[str]) -> int:
    """Walk, take the pictures, and return 1 if something was printed otherwise than a page says."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = walk(folder)
    ways = [go(pages(), folder) for pages in WAYS.values()]
    transcript = "".join(one.transcript for one in (found, *ways))
    differing = [text for one in (found, *ways) for text in one.differing]
    (folder / "transcript.txt").write_text(transcript, encoding="utf-8")
    with browser((1280, 887)) as shown:
        for name, page in found.pages.items():
            shown.open(page)
            shown.driver.save_screenshot(str(folder / f"{name}.png"))
    for text in differing:
        print(f"not what the page says:\n{text}")
    print(f"{folder}: {len(transcript.splitlines())} lines in transcript.txt, {', '.join(found.pages)} as pictures")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
