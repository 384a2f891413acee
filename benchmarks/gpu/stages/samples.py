"""Let torch's operator samples be imported where the package expecttest is missing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

# torch.testing._internal derives its own test cases from this class; the samples use neither.
TEXT = "import unittest\n\nTestCase = unittest.TestCase\n"


def is_there() -> bool:
    """True if expecttest can be imported."""
    return find_spec("expecttest") is not None


@contextmanager
def stand_in() -> Iterator[str]:
    """While open, ``import expecttest`` works; yields the folder that was added to ``sys.path``, or an empty text."""
    if is_there():
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "expecttest.py").write_text(TEXT, encoding="utf-8")
        sys.path.append(folder)
        try:
            yield folder
        finally:
            sys.path.remove(folder)
