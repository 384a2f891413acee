"""Specs of pytrees read without building an object: paths to the leaves, and the tree in words."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autocastfx.capture.call import leaf_paths, written

Pair = namedtuple("Pair", "first second")


@dataclass
class Fields:
    x: Any
    y: Any = None
    z: Any = None


pytree.register_dataclass(Fields)


@pytest.mark.parametrize(
    ("tree", "paths", "text"),
    [
        (3, [()], "0"),
        ([], [], "[]"),
        ([5, (6,)], [(0,), (1, 0)], "[0, (1,)]"),
        ({"a": 1, 3: [2]}, [("a",), (3, 0)], "{a: 0, 3: [1]}"),
        ({"a": {"b": 1, "c": 2}}, [("a", "b"), ("a", "c")], "{a: {b: 0, c: 1}}"),
        ({1: 5, 0: 6}, [(1,), (0,)], "{1: 0, 0: 1}"),
        (OrderedDict(a=1), [("a",)], "OrderedDict(a=0)"),
        (defaultdict(list, a=1), [("a",)], "defaultdict(a=0)"),
        (deque([1, 2], maxlen=3), [(0,), (1,)], "deque(0, 1)"),
        (Pair(1, [2]), [("first",), ("second", 0)], "Pair(first=0, second=[1])"),
        (Fields(1, z=2), [("x",), ("z",)], "Fields(x=0, z=1)"),
        (torch.Size([1, 2]), [(0,), (1,)], "Size(0, 1)"),
        (torch.ones(3).max(0), [(0,), (1,)], "max(0, 1)"),
    ],
)
def test_paths_and_words(tree: Any, paths: list[tuple[Any, ...]], text: str) -> None:
    leaves, spec = pytree.tree_flatten(tree)
    assert leaf_paths(spec) == paths
    assert written(spec, map(str, range(len(leaves)))) == text
