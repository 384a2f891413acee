"""Complete the command line in a shell, by argcomplete, from a file of words: the parsers themselves import torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = Path(__file__).with_name("words.json")


def complete() -> None:
    """Answer a shell that asks for completions, and end the process; without argcomplete, do nothing."""
    try:
        import argcomplete
    except ImportError:
        return
    parser = argparse.ArgumentParser(add_help=False)
    _add(parser, json.loads(WORDS.read_text(encoding="utf-8")))
    argcomplete.autocomplete(parser)


def _add(parser: argparse.ArgumentParser, words: Sequence[Mapping[str, Any]]) -> None:
    for word in words:
        if "commands" in word:
            commands = parser.add_subparsers()
            for name, inner in word["commands"].items():
                _add(commands.add_parser(name, add_help=False), inner)
        elif word["nargs"] == 0:
            parser.add_argument(*word["names"], action="store_true")
        else:
            action = "append" if word["repeats"] else "store"
            parser.add_argument(*word["names"], action=action, nargs=word["nargs"], choices=word["choices"])


def words_of(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return the arguments of a parser, and of its commands, as the file holds them."""
    words: list[dict[str, Any]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append({"commands": {name: words_of(inner) for name, inner in action.choices.items()}})
        else:
            names, choices = list(action.option_strings or [action.dest]), action.choices and list(action.choices)
            repeats = isinstance(action, argparse._AppendAction)
            words.append({"names": names, "nargs": action.nargs, "choices": choices, "repeats": repeats})
    return words
