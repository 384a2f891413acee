"""Store a benchmark's rows in a JSON file with the machine, one by one, so that it can be resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.machine import machine

R = TypeVar("R")
K = TypeVar("K")


class Store(Generic[R]):
    """The rows measured so far on the same machine, with the same versions, commit and settings.

    Args:
        path: the file; rows measured otherwise are dropped when new ones are added. None: rows stay in memory.
        kind: the dataclass of a row.
        settings: written with the rows.
    """

    def __init__(self, path: Path | None, kind: Callable[..., R], settings: dict[str, Any]) -> None:
        self.path, self.rows, self._where = path, list[R](), {**machine(), **settings}
        held = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        same = {key: value for key, value in self._where.items() if key != "date"}
        if {key: held.get(key) for key in same} == json.loads(json.dumps(same)):
            self.rows = [kind(**row) for row in held["rows"]]

    def extend(self, rows: Iterable[R]) -> None:
        """Add ``rows`` and write the file at once, so that an interruption loses none."""
        self.rows += rows
        if self.path is not None:
            found: list[Any] = list(self.rows)
            lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in found)  # a row each
            text = json.dumps({**self._where, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{lines}\n ]')
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.path)

    def fill(self, wanted: Iterable[K], key: str, measure: Callable[[K], Iterable[R]]) -> None:
        """Measure what is wanted and no row has, and add its rows at once; each is named on stderr.

        Args:
            wanted: what to measure, as the rows name it.
            key: the attributes of a row that name what was measured, separated by spaces.
            measure: returns the rows of one that is wanted.
        """
        held = {attrgetter(*key.split())(row) for row in self.rows}
        for one in wanted:
            if one not in held:
                named = one if isinstance(one, tuple) else (one,)
                print(f"{', '.join(map(str, named))} ...", file=sys.stderr, flush=True)
                self.extend(measure(one))
