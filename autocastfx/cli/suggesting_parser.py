"""An argument parser that says in two lines what is wrong, and what was meant by an unknown command or choice."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from autocastfx.policy.yaml_tree import nearest

__all__ = ["suggesting_parser"]


def suggesting_parser(**arguments: Any) -> argparse.ArgumentParser:
    """Make a parser, with arguments as for ``argparse.ArgumentParser``, whose subcommands' parsers suggest too."""
    return _SuggestingParser(**arguments)


class _SuggestingParser(argparse.ArgumentParser):
    """Names the nearest command or choice, as argparse does from Python 3.14 on if asked to."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from error

    def error(self, message: str) -> NoReturn:
        """End with code 2 and the message, without the usage, which takes ten lines."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help shows all arguments.\n")
