"""The command line that all benchmarks share: what to measure, on which device, and the file that keeps it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import keep_memory

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Command(argparse.ArgumentParser):
    """The command line of a benchmark.

    Args:
        module: its name in this package.
        doc: its docstring, whose first line is shown.
        stores: True if ``--json`` names the file of its rows.
    """

    def __init__(self, module: str, doc: str | None, *, stores: bool = True) -> None:
        super().__init__(prog=f"python -m benchmarks.{module}", description=(doc or "").partition("\n")[0])
        if stores:
            self.add_argument("--json", type=Path, help="the file of rows; what it holds is not measured again")

    def names(
        self, option: str, known: Iterable[str], *, chosen: Iterable[str] | None = None, separator: str = ","
    ) -> None:
        """Add an option that takes ``known`` names; by default those ``chosen``, or all."""
        there = list(known)

        def read(text: str) -> list[str]:
            found = text.split(separator)
            if unknown := [name for name in found if name not in there]:
                what = (f"{separator} ".join(names) for names in (unknown, there))
                raise argparse.ArgumentTypeError("unknown: {}; there are {}".format(*what))
            return found

        default = separator.join(there if chosen is None else chosen)
        self.add_argument(option, type=read, default=default, help=f"separated by {separator!r}")

    def numbers(self, option: str, default: Iterable[int], least: int = 1) -> None:
        """Add an option that takes numbers, separated by commas."""
        one = _number(least, "")
        self.add_argument(
            option, type=lambda text: [one(part) for part in text.split(",")], default=",".join(map(str, default))
        )

    def number(self, option: str, default: int, least: int = 1, why: str = "") -> None:
        """Add an option that takes one number; ``why`` says why it is not less than ``least``."""
        self.add_argument(option, type=_number(least, why), default=default, help="default: %(default)s")

    def rounds(self, default: int) -> None:
        """Add the number of rounds, which quartiles are taken over."""
        self.number("--rounds", default, 2, "quartiles need two or more")

    def device(self) -> None:
        """Add the device and the 16-bit dtype."""
        self.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
        self.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))

    def begin(self, arguments: Sequence[str] | None, *, is_timed: bool = False) -> argparse.Namespace:
        """Read the arguments. torch then uses one thread, and what is timed keeps the memory that it frees."""
        options = self.parse_args(arguments)
        torch.set_num_threads(1)
        if is_timed:
            keep_memory()
        return options


def _number(least: int, why: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(f"a number, not {text!r}")
        if int(text) < least:
            raise argparse.ArgumentTypeError(why or f"at least {least}")
        return int(text)

    return read


def settings_of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that are written with the rows; on a GPU also its name."""
    found = {name: getattr(options, name) for name in names}
    is_cuda = getattr(options, "device", "cpu") == "cuda"
    return {**found, **({"device": torch.cuda.get_device_name()} if is_cuda else {})}


def verdict(table: str, missed: Sequence[str] = ()) -> int:
    """Print the table and what is missed; return the exit status, 1 if anything is."""
    print(table, *missed, sep="\n")
    return int(bool(missed))
