"""``python -m tests.golden`` writes the kept texts, the outputs in README.md and docs, and the tables of words."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import autocastfx
from autocastfx.cli.completion import WORDS, words_of
from autocastfx.cli.main import parser_of_all
from tests.golden.decoders import KEPT as DECODERS
from tests.golden.decoders import attentions
from tests.golden.list_tables import filled
from tests.golden.models import CASES, LINTS, comparable, kept, kept_lint
from tests.golden.readme import (
    CONVERTED_MODEL,
    FLOAT8,
    HOW_TO,
    INTEGRATIONS,
    NUMERICS,
    OP_LISTS,
    PAGE,
    PLACEMENT,
    README,
    TUNING,
    TUTORIAL,
    WHEN_TO_USE,
    run,
    updated,
    without_further_packages,
)


def main() -> None:
    for name, make in CASES.items():
        kept(name).write_text(comparable(autocastfx.dump(make())), encoding="utf-8")
        print(kept(name))
    for name in LINTS:
        kept_lint(name).write_text(f"{autocastfx.lint(CASES[name]())}\n", encoding="utf-8")
        print(kept_lint(name))
    WORDS.write_text(json.dumps(words_of(parser_of_all()), separators=(",", ":")) + "\n", encoding="utf-8")
    print(WORDS)
    DECODERS.write_text(attentions(), encoding="utf-8")
    print(DECODERS)
    for page in (OP_LISTS, PLACEMENT):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for page in (
        README,
        OP_LISTS,
        FLOAT8,
        PAGE,
        NUMERICS,
        TUNING,
        WHEN_TO_USE,
        TUTORIAL,
        HOW_TO,
        PLACEMENT,
        INTEGRATIONS,
        CONVERTED_MODEL,
    ):
        text = page.read_text(encoding="utf-8")
        runs = without_further_packages(text)
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(updated(runs, run(runs, Path(folder))) + text[len(runs) :], encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
