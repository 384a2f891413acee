"""The evaluations of a search, each kept in a file at once, so that an interrupted search goes on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autocastfx.errors import EvaluationsError
from autocastfx.files import read_whole, write_whole
from autocastfx.plan.json_text import parsed_json

__all__ = ["Evaluations"]

_FORMAT = 1


@dataclass
class Evaluations:
    """What was measured of one search, by what it was measured of.

    Attributes:
        path: of the file; None: nothing is kept.
        search: what tells this search from others.
        known: what was measured.
    """

    path: Path | None
    search: Mapping[str, Any]
    known: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, path: Path | None, search: Mapping[str, Any]) -> Evaluations:
        """Those in the file, if there is one.

        Raises:
            EvaluationsError: it is no such file, or that of another search.
            OSError: it cannot be read.
        """
        if path is None or not path.exists():
            return cls(path, search)
        try:
            data: dict[str, Any] = parsed_json(read_whole(path))
            written, known = data["search"], {str(key): float(value) for key, value in data["known"].items()}
            fits = data["format"] == _FORMAT
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationsError(f"{path} holds no evaluations of a search: {error!r}. Give another file.") from error
        if not fits or written != search:
            other = [key for key, value in search.items() if not fits or written.get(key) != value]
            raise EvaluationsError(
                f"{path} holds the evaluations of another search: its {' and '.join(other)} differ. Give "
                "another file, or remove this one."
            )
        return cls(path, search, known)

    def keep(self, key: str, value: float) -> None:
        """Remember one, and write all to the file, which is never half written.

        Raises:
            OSError: the file cannot be written.
        """
        self.known[key] = value
        if self.path is None:
            return
        text = json.dumps({"format": _FORMAT, "search": self.search, "known": self.known}, indent=1)
        write_whole(self.path, text)
