"""Turn Python mappings and lists into the same tree as parsed YAML, so that the same checks apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from autocastfx.errors import KeyPath, OpListError, shown
from autocastfx.policy.yaml_tree import STANDARD, Tree

__all__ = ["tree_of"]

_WORDS = {type(None): "null", bool: "bool", int: "int", float: "float"}


def tree_of(data: Mapping[str, Any], name: str) -> Tree:
    """Turn Python data into a tree; messages call it ``name``.

    Raises:
        OpListError: the data holds a value that YAML cannot express, or is nested too deeply.
    """
    start = KeyPath(name)
    try:
        root = _node(data, start)
    except RecursionError:
        raise OpListError("this is not an op list: it is nested too deeply.", start) from None
    tree = Tree(root, start)
    tree.items()
    return tree


def _node(data: Any, place: KeyPath) -> yaml.Node:
    mark: Any = place
    if isinstance(data, Mapping):
        pairs = [(_node(key, place.key(key)), _node(value, place.key(key))) for key, value in data.items()]
        return yaml.MappingNode(f"{STANDARD}map", pairs, mark)
    if isinstance(data, (list, tuple)):
        members = [_node(member, place.index(i)) for i, member in enumerate(data)]
        return yaml.SequenceNode(f"{STANDARD}seq", members, mark)
    if isinstance(data, str):
        return yaml.ScalarNode(f"{STANDARD}str", str.__str__(data), mark)
    if type(data) not in _WORDS:
        raise OpListError(f"an op list holds text, numbers, lists and mappings, no {type(data).__name__}", place)
    try:
        text = yaml.safe_dump(data).split()[0]
    except ValueError:  # Python writes integers of 4,300 digits at most
        raise OpListError(f"an op list takes no {shown(data)}", place) from None
    return yaml.ScalarNode(f"{STANDARD}{_WORDS[type(data)]}", text, mark)
