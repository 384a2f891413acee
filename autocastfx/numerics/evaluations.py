"""Store the evaluations of a bisection in a file, so that an interrupted search can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autocastfx.errors import EvaluationsError
from autocastfx.files import parsed_json, read_whole, write_whole

__all__ = ["Evaluations"]

_FORMAT = 1


@dataclass
class Evaluations:
    """The evaluations of a search.

    Attributes:
        path: the file; None: nothing is stored.
        search: data that identifies the search.
        known: the metric, by the places in float32.
    """

    path: Path | None
    search: Mapping[str, Any]
    known: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, path: Path | None, search: Mapping[str, Any]) -> Evaluations:
        """Read the evaluations in the file, if it exists.

        Raises:
            EvaluationsError: the file is not of this format, or of another search.
            OSError: the file cannot be read.
        """
        if path is None or not path.exists():
            return cls(path, search)
        try:
            data: dict[str, Any] = parsed_json(read_whole(path))
            written, known = data["search"], {str(key): float(value) for key, value in data["known"].items()}
            fits = data["format"] == _FORMAT
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationsError(f"{path} holds no evaluations of a search: {error!r}. Give another file.") from None
        if not fits or written != search:
            other = [key for key, value in search.items() if not fits or written.get(key) != value]
            raise EvaluationsError(
                f"{path} holds the evaluations of another search: its {' and '.join(other)} differ. Give "
                "another file, or remove this one."
            )
        return cls(path, search, known)

    def keep(self, key: str, value: float) -> None:
        """Add an evaluation, and write all to the file, which is replaced as a whole.

        Raises:
            OSError: the file cannot be written.
        """
        self.known[key] = value
        if self.path is None:
            return
        text = json.dumps({"format": _FORMAT, "search": self.search, "known": self.known}, indent=1)
        write_whole(self.path, text)
