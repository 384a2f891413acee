"""Read text and JSON with clear errors, turn JSON into dataclasses, and write files whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import yaml

from autocastfx.errors import Source

# Read text files with clear errors, and write them whole or not at all.


def read_whole(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        OSError: the file cannot be read, or the path is invalid.
        UnicodeDecodeError: the file is not UTF-8 text.
    """
    _check_path(path)
    return path.read_text(encoding="utf-8")


def _check_path(path: Path) -> None:
    """Raise ``OSError`` for the invalid paths that Python rejects before it calls the system."""
    try:
        held = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"its path has a character that no file name has ({error.reason})") from None
    if b"\0" in held:
        raise OSError(errno.EINVAL, "its path has a NUL character, which no file name has")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before work that may take minutes.

    Raises:
        IsADirectoryError: the path is a folder.
        FileNotFoundError: its folder does not exist.
        OSError: the path is invalid.
    """
    _check_path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path to write to. It replaces ``path`` at the end, unless an error was raised.

    A symbolic link is kept and its target replaced. Anything but a plain file, such as ``/dev/null``, is written to
    directly.
    """
    _check_path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 with the same line ends on every system.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


# Parse JSON text; every kind of bad text raises the same exception.

_DEEPEST = 100  # levels; recursive Python code handles a few hundred
_INTEGER = re.compile(r'"(?:[^"\\]|\\.)*"|(?<![\d.])(\d+)(?![\d.eE])')  # group 1 is an integer outside of strings


def parsed_json(text: str) -> Any:
    """Parse ``text``.

    Raises:
        json.JSONDecodeError: the text is not JSON, nests more than 100 levels deep, or has an integer with more digits
            than Python reads.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep(text) from None
    except ValueError:  # Python reads integers of 4,300 digits at most
        found = max((match for match in _INTEGER.finditer(text) if match[1]), key=lambda match: len(match[1]))
        what = f"an integer has {len(found[1])} digits, too many to read"
        raise json.JSONDecodeError(what, text, found.start(1)) from None
    level = [data]
    for _ in range(_DEEPEST):
        level = [child for held in level for child in _children(held)]
        if not level:
            return data
    raise _too_deep(text)


def json_places(text: str, file: str, *path: str | int) -> tuple[Source, ...]:
    """Return the places of the value at ``path`` in right JSON text, and of its members if it is a list.

    YAML's parser reads JSON too, and keeps places.
    """
    plain = re.sub(r"\\.|[^\n -~]", lambda match: " " * len(match[0]), text)  # without what YAML reads otherwise
    node: Any = yaml.compose(plain, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for step in path:
        if isinstance(node, yaml.MappingNode):
            node = {key.value: value for key, value in node.value}.get(step, node)
        else:
            node = node.value[step]
    marks = [one.start_mark for one in (node, *(node.value if isinstance(node, yaml.SequenceNode) else ()))]
    return tuple(Source(file, mark.line + 1, mark.column + 1) for mark in marks)


def _children(held: Any) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else held if isinstance(held, list) else []


def _too_deep(text: str) -> json.JSONDecodeError:
    return json.JSONDecodeError("it is nested too deeply", text, 0)


# Turn dataclasses into what JSON holds, and back, by their fields and the types of these.

Conversions = Mapping[Any, Callable[[Any], Any]]  # by the type of a value
_NONE: Conversions = {}
NON_FINITE_AS_TEXT: Conversions = {float: lambda number: number if math.isfinite(number) else str(number)}


def plain_data(value: Any, written: Conversions = _NONE) -> Any:
    """Turn dataclasses into dicts and tuples into lists; values of a type in ``written`` are converted by that."""
    if type(value) in written:
        return written[type(value)](value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain_data(getattr(value, field.name), written) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain_data(held, written) for key, held in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(held, written) for held in cast("Sequence[Any]", value)]
    return value


def typed_data(kind: Any, data: Any, read: Conversions = _NONE) -> Any:
    """Make a ``kind`` of the ``data`` that :func:`plain_data` makes of one.

    It may be a dataclass, an enum, ``X | None``, ``tuple[X, ...]``, ``Mapping[str, X]``, and what JSON knows. Values of
    a type in ``read`` are read by that. Fields with a default may be missing.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: no ``kind`` is written so.
    """
    if kind in read:
        return read[kind](data)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{key: typed_data(hints.get(key), held, read) for key, held in data.items()})
    inner = get_args(kind)
    if type(None) in inner:
        return None if data is None else typed_data(inner[0], data, read)
    if get_origin(kind) is tuple:
        return tuple(typed_data(inner[0], held, read) for held in data)
    if inner:
        return {key: typed_data(inner[1], held, read) for key, held in data.items()}
    return kind(data) if kind is float or (isinstance(kind, type) and issubclass(kind, Enum)) else data


_hints = lru_cache(get_type_hints)
