"""The parsers of the command line: they suggest what was meant, keep positional arguments out of options, and group."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autocastfx.policy.yaml_tree import nearest

# Titles of groups of arguments in --help, in their order.
MODEL, CONVERSION, WRITTEN = "the model and a call of it", "the conversion", "the output"
_ENDLESS = (argparse.ONE_OR_MORE, argparse.ZERO_OR_MORE)


class SuggestingParser(argparse.ArgumentParser):
    """Names the nearest command or choice, as argparse does from Python 3.14 on if asked to; in subcommands too."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # its types have overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, after an option such as ``--inputs`` has given back the positional arguments behind its own."""
        return super().parse_known_args(None if args is None else in_order(self, args), namespace)

    def format_help(self) -> str:
        """Write the help, with the groups in the order in which a command line is made."""
        titles = [MODEL, CONVERSION, WRITTEN]
        self._action_groups.sort(key=lambda one: titles.index(str(one.title)) if one.title in titles else len(titles))
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from error

    def error(self, message: str) -> NoReturn:
        """End with code 2 and the message, without the usage, which takes ten lines."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help shows all arguments.\n")


def in_order(parser: argparse.ArgumentParser, args: Sequence[str]) -> list[str]:
    """Return the arguments with the positional ones first.

    An option that takes several values would take the positional arguments behind them, too: as many as are missing
    elsewhere are left to these; and of ``--inputs`` all from the first on that is no input, where positional arguments
    may be any number. What this does not understand it leaves to argparse.
    """
    positional = [action for action in parser._actions if not action.option_strings]
    if "--" in args or any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in positional):
        return list(args)
    is_open = any(action.nargs in _ENDLESS for action in positional)
    given, options = list[int](), list[list[int]]()  # by their places
    place = 0
    while place < len(args):
        word = args[place]
        place += 1
        if not word.startswith("-") or word == "-":
            given.append(place - 1)
            continue
        action = _option(parser, word)
        if action is None:
            return list(args)
        count = 0 if "=" in word and word.startswith("--") else _values(action, args[place:])
        values = range(place, place + count)
        if is_open and action.dest == "inputs" and action.nargs in _ENDLESS:
            kept = next((i for i, at in enumerate(values) if i and not is_input(args[at])), count)
            given += values[kept:]
            values = values[:kept]
        options.append([place - 1, *values])
        place += count
    least = sum(1 if action.nargs in (None, argparse.ONE_OR_MORE) else 0 for action in positional)
    for places in reversed(options):
        action = _option(parser, args[places[0]])
        missing = least - len(given)
        if missing > 0 and action is not None and action.nargs in _ENDLESS and len(places) - 2 >= missing:
            given += places[-missing:]
            del places[-missing:]
    return [args[at] for at in (*sorted(given), *(at for places in options for at in places))]


def is_input(word: str) -> bool:
    """True for what ``--inputs`` takes: tensors such as ``x=float32[2,8]``, and ``package.module:factory``."""
    return "[" in word or ":" in word


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """Return the option that a word names, in full or by the beginning of its name; None if that is not clear."""
    known, name = parser._option_string_actions, word.partition("=")[0]
    if name in known:
        return known[name]
    found = {id(action): action for option, action in known.items() if option.startswith(name) and name[:2] == "--"}
    return next(iter(found.values())) if len(found) == 1 else None


def _values(action: argparse.Action, rest: Sequence[str]) -> int:
    """Return how many of the words behind an option are its values."""
    run = next((i for i, word in enumerate(rest) if word.startswith("-") and word != "-"), len(rest))
    if action.nargs is None:
        return min(1, len(rest))
    if isinstance(action.nargs, int):
        return min(action.nargs, len(rest))
    if action.nargs == argparse.OPTIONAL:  # as argparse does, which takes any word behind it
        return min(1, run)
    return run


# Groups and examples of --help.


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the parser's group of this title, made if there is none: parsers and their parents share groups."""
    known = [one for one in parser._action_groups if one.title == title]
    return known[0] if known else parser.add_argument_group(title)


def add_file(parser: argparse._ActionsContainer, *names: str, metavar: str = "FILE", **how: Any) -> None:
    """Add an option that takes the path of a file, to a parser or a group of it."""
    parser.add_argument(*names, type=Path, metavar=metavar, **how)


def add_factory(parser: argparse.ArgumentParser, name: str, gives: str, **how: Any) -> None:
    """Add an option that takes a factory, by which the model is called; ``gives`` says what the factory returns."""
    said = f"package.module:factory, giving {gives}"
    group(parser, MODEL).add_argument(f"--{name}", metavar=name.upper(), help=said, **how)


def with_examples(
    add: Callable[..., argparse.ArgumentParser], examples: Mapping[str, str]
) -> Callable[..., argparse.ArgumentParser]:
    """Return ``add``, the subcommands' ``add_parser``, for parsers whose ``--help`` ends with an example, if any.

    The ``examples`` are command lines by command, without the program's name.
    """

    def add_parser(name: str, **arguments: Any) -> argparse.ArgumentParser:
        said: str = arguments["help"]
        parser = add(
            name,
            description=f"{said[:1].upper()}{said[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **arguments,
        )
        if name in examples:
            parser.epilog = f"example:\n  {parser.prog.removesuffix(name)}{examples[name]}"
        return parser

    return add_parser
