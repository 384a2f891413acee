"""Breadth-first search: all that can be reached from some nodes by steps from each to its neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["reachable"]

T = TypeVar("T", bound=Hashable)


def reachable(starts: Iterable[T], neighbours: Callable[[T], Iterable[T]]) -> dict[T, T]:
    """The ``starts`` and all that they lead to, nearest first, each with the start that leads to it first.

    Args:
        starts: each leads to itself.
        neighbours: one step further; called once for each that is reached.
    """
    found = {start: start for start in starts}
    queue = deque(found)
    while queue:
        here = queue.popleft()
        for near in neighbours(here):
            if near not in found:
                found[near] = found[here]
                queue.append(near)
    return found
