"""Write the arguments of an op that are no values: dimensions, epsilons, modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autocastfx.dtypes import dtype_name
from autocastfx.graph.node import settings

__all__ = ["attributes"]

_LONGEST_TEXT = 80


def attributes(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Return the names of such arguments of a node, with what the call gives: ``("dim", "-1")``.

    A size that another node computes is written by that node's name. Without a schema, the name is a position.
    """
    if node.op != "call_function":
        return ()
    return tuple((f"argument {name}" if name.isdecimal() else name, _cut(_text(held))) for name, held in settings(node))


def _text(held: Any) -> str:
    if isinstance(held, (list, tuple)):
        return f"[{', '.join(map(_text, held))}]"
    if isinstance(held, torch.dtype):
        return dtype_name(held)
    return held.name if isinstance(held, fx.Node) else repr(held)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
