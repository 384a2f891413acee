"""Runs the command line as a person does, and gives what it says."""

from __future__ import annotations

import pytest

from autocastfx.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = main(argv)
    return (code, *capsys.readouterr())
