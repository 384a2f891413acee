"""Parse JSON text; every kind of bad text raises the same exception."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["parsed_json"]

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


def _children(held: Any) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else held if isinstance(held, list) else []


def _too_deep(text: str) -> json.JSONDecodeError:
    return json.JSONDecodeError("it is nested too deeply", text, 0)
