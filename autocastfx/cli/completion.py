"""Let a shell complete the command line, if argcomplete is installed."""

from __future__ import annotations

import argparse
import os

__all__ = ["complete"]


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and end the process; do nothing otherwise."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)
