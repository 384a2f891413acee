"""Operators that converted graphs call."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch.compiler import config

_PACKAGE = Path(__file__).parents[2]
_READ = (_PACKAGE / "dtypes.py", _PACKAGE / "policy" / "float8.py")  # by which operators compute


def _digest() -> str:
    """A short digest of the operators' source, as far as it is installed."""
    files = sorted(file for file in (*Path(__file__).parent.glob("*.py"), *_READ) if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# torch's caches of compiled code on disk are keyed by graphs in which these operators stand by their names: without a
# tag, code compiled from another version of them would be taken.
if (_tag := f"autocastfx-{_digest()}") not in config.cache_key_tag:
    config.cache_key_tag = f"{config.cache_key_tag} {_tag}".strip()
