"""Write the nodes of a page by columns, each different value once: a third of their text. ``packed.js`` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# In values these characters stand for the node's own name and module, of which most sentences about it have one.
OWN: Mapping[str, str] = {"name": "\x01", "module": "\x02"}


def packed(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many nodes there are, and by key the values that occur and, for each node, the number of its own.

    The numbers are separated by blanks; a node without the key has none.
    """
    keys = dict.fromkeys(key for node in nodes for key in node)
    return {"count": len(nodes), "columns": {key: _column(key, nodes) for key in keys}}


def _column(key: str, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    at: list[str] = []
    for node in nodes:
        if key not in node:
            at.append("")
            continue
        value = node[key] if key in OWN else _with_signs(node[key], node)
        at.append(str(numbers.setdefault(json.dumps(value, ensure_ascii=False), len(numbers))))
    return {"of": [json.loads(text) for text in numbers], "at": " ".join(at)}


def _with_signs(value: Any, node: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        for key, sign in OWN.items():
            if len(own := str(node.get(key, ""))) > 1:
                value = value.replace(own, sign)
        return value
    if isinstance(value, (list, tuple)):
        return [_with_signs(one, node) for one in value]
    return {k: _with_signs(one, node) for k, one in value.items()} if isinstance(value, dict) else value
