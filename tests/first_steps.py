"""``python -m tests.first_steps FOLDER`` goes a newcomer's way: README.md, the tutorial, and the pages that they make.

Every Python block runs, and what it prints is compared with what the page says. A browser opens the page of the model
in README.md, and one of the tutorial's planted fault. FOLDER gets the files, a transcript and the pictures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.browser import browser
from tests.golden.readme import README, TUTORIAL, outputs, run

__all__ = ["Walk", "main", "walk"]

FAULT = """

```python
autocastfx.dump(edited, "fault.html", comparison=autocastfx.compare(None, edited, readings))
```
"""


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


def walk(folder: Path) -> Walk:
    """Run README.md and the tutorial in ``folder``."""
    printed: list[str] = []
    differing: list[str] = []
    for page, more in ((README, ""), (TUTORIAL, FAULT)):
        text = page.read_text(encoding="utf-8") + more
        found = run(text, folder)
        printed += [f"== {page.name}\n", *found.values()]
        differing += [found[code.start] for code, shown in outputs(text) if found[code.start] != shown.text]
    pages = {"readme": folder / "model.html", "fault": folder / "fault.html"}
    return Walk("".join(printed), tuple(differing), pages)


def main(arguments: list[str]) -> int:
    """Walk, take the pictures, and return 1 if something was printed otherwise than a page says."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = walk(folder)
    (folder / "transcript.txt").write_text(found.transcript, encoding="utf-8")
    with browser((1280, 887)) as shown:
        for name, page in found.pages.items():
            shown.open(page)
            shown.driver.save_screenshot(str(folder / f"{name}.png"))
    for text in found.differing:
        print(f"not what the page says:\n{text}")
    print(
        f"{folder}: {len(found.transcript.splitlines())} lines in transcript.txt, {', '.join(found.pages)} as pictures"
    )
    return int(bool(found.differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
