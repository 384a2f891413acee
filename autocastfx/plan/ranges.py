"""Magnitudes of a model's values, measured on calibration data, as plain data to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from autocastfx.errors import CalibrationError, Source, UnknownNameError
from autocastfx.files import json_places, parsed_json, read_whole, write_whole
from autocastfx.graph.magnitude import Magnitude
from autocastfx.graph.walk import MODES, Key

VERSION = 2


@dataclass(frozen=True)
class MeasuredNode:
    """A node of which something was measured, in a mode: the attributes by which it is found again."""

    mode: str
    name: str
    op: str
    module: str

    @property
    def key(self) -> Key:
        """The key of the node in a graph of this mode."""
        return self.name, self.op, self.module


@dataclass(frozen=True)
class Range(MeasuredNode):
    """The measured magnitudes of one value, the output of a node.

    Attributes:
        mode: ``"train"`` or ``"eval"``.
        name: the node's name.
        op: the node's op name.
        module: the path of the module that made the node.
        largest: the largest magnitude of a finite element.
        rms: the root mean square of the finite elements that are not 0; the largest over the batches.
        non_finite: the number of Inf and NaN elements.
    """

    largest: float
    rms: float
    non_finite: int = 0

    def merged(self, other: Range) -> Range:
        """Merge two measurements of the value: the larger magnitudes, and the sum of the counts."""
        larger = {name: max(getattr(self, name), getattr(other, name)) for name in ("largest", "rms")}
        return dataclasses.replace(self, **larger, non_finite=self.non_finite + other.non_finite)


Measured = TypeVar("Measured", bound=MeasuredNode)


def each_once(measured: Iterable[Measured], merge: Callable[[Measured, Measured], Measured]) -> tuple[Measured, ...]:
    """Merge what was measured of the same node in the same mode."""
    merged: dict[tuple[str, Key], Measured] = {}
    for one in measured:
        before = merged.get((one.mode, one.key))
        merged[one.mode, one.key] = one if before is None else merge(before, one)
    return tuple(merged.values())


def in_mode(measured: Sequence[Measured], mode: str) -> dict[Key, Measured]:
    """Return what was measured in graphs of ``mode``; in those of the other mode if only that was measured."""
    own = {one.key: one for one in measured if one.mode == mode}
    return own or {one.key: one for one in measured}


@dataclass(frozen=True)
class Ranges:
    """The measured magnitudes of a model's float32 values over calibration batches.

    Attributes:
        values: one range per value and mode, in the order of the graphs.
        batches: the number of batches.
    """

    values: tuple[Range, ...]
    batches: int = field(default=0)

    def __getitem__(self, name: str) -> Range:
        """Return the range of the node called ``name``; the largest if modes or modules share the name.

        Raises:
            KeyError: no measured node has this name.
        """
        ranges = [r for r in self.values if r.name == name]
        if not ranges:
            raise UnknownNameError(f"no value {name!r} was measured")
        return max(ranges, key=lambda r: r.largest)

    def magnitudes(self, mode: str) -> Mapping[Key, Magnitude]:
        """Return the magnitudes in graphs of ``mode``; of the other mode if only that was measured."""
        return {key: Magnitude(r.largest, r.rms) for key, r in in_mode(self.values, mode).items()}

    def merged(self, other: Ranges) -> Ranges:
        """Merge two measurements: for a value in both, the larger magnitudes and the sum of the counts."""
        return Ranges(each_once((*self.values, *other.values), Range.merged), self.batches + other.batches)

    def to_json(self) -> str:
        """Write the ranges as JSON text, one value a line; :meth:`from_json` reads it back."""
        lines = (json.dumps(dataclasses.asdict(r), ensure_ascii=False) for r in self.values)
        head = f'{{"autocastfx_ranges": {VERSION}, "batches": {self.batches}, "values": [\n'
        return head + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, *, file: str = "ranges") -> Ranges:
        """Read the ranges that :meth:`to_json` wrote. ``file`` is the text's name in messages.

        Raises:
            CalibrationError: the text is not such JSON, or of another version; the message names line and column.
        """
        try:
            data = parsed_json(text)
        except json.JSONDecodeError as error:
            place = Source(file, error.lineno, error.colno)
            raise CalibrationError(f"this is not JSON: {error.msg}. Calibrate again.", place) from None
        try:
            return _read(data)
        except _Malformed as error:
            place = json_places(text, file, *error.path)[0]
            raise CalibrationError(f"{error}. The file is written by Ranges.save; calibrate again.", place) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ranges to ``path`` as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ranges:
        """Read the ranges that :meth:`save` wrote to ``path``.

        Raises:
            CalibrationError: the file cannot be read, or holds no ranges; the message names file, line and column.
        """
        try:
            text = read_whole(Path(path))
        except (OSError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or error
            raise CalibrationError(f"cannot read the ranges {path}: {what}. Ranges.save writes such a file.") from None
        return cls.from_json(text, file=str(path))


class _Malformed(Exception):
    """An error in the data, with the keys and indices that lead to it."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


def _read(data: Any) -> Ranges:
    if not isinstance(data, dict) or "autocastfx_ranges" not in data:
        raise _Malformed("these are no ranges: the key 'autocastfx_ranges' is missing")
    version = data["autocastfx_ranges"]
    if version != VERSION:
        raise _Malformed(f"this is version {version!r} of the format, not {VERSION}", "autocastfx_ranges")
    if not _is_count(data.get("batches")):
        raise _Malformed(f"'batches' is a count, not {data.get('batches')!r}", "batches")
    if not isinstance(data.get("values"), list):
        raise _Malformed("'values' is a list", "values")
    values = (_range(entry, i) for i, entry in enumerate(data["values"]))
    return Ranges(each_once(values, Range.merged), data["batches"])


def _range(entry: Any, index: int) -> Range:
    names = [f.name for f in dataclasses.fields(Range)]
    if not isinstance(entry, dict) or set(cast("dict[str, Any]", entry)) != set(names):
        raise _Malformed(f"a value has the keys {', '.join(names)}", "values", index)
    checks = {
        "mode": (f"one of {', '.join(MODES)}", entry["mode"] in MODES),
        **{n: ("a finite number of at least 0", _is_magnitude(entry[n])) for n in ("largest", "rms")},
        "non_finite": ("a count", _is_count(entry["non_finite"])),
        **{name: ("text", isinstance(entry[name], str)) for name in ("name", "op", "module")},
    }
    for name, (wanted, holds) in checks.items():
        if not holds:
            raise _Malformed(f"{name!r} is {wanted}, not {entry[name]!r}", "values", index, name)
    return Range(**entry)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_magnitude(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
