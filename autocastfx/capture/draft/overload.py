"""Find the ATen operator for a call in a model's Python code, so that drafts read like exported graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import map_arg

from autocastfx.graph.node import value

__all__ = ["overload", "reflected"]

_KEYWORDS = {"input": "self", "axis": "dim", "x": "self"}
_REFLECTED = {
    operator.sub: "__rsub__",
    operator.truediv: "__rdiv__",
    operator.pow: "__rpow__",
    operator.floordiv: "__rfloordiv__",
    operator.mod: "__rmod__",
}
_SYMMETRIC = (operator.add, operator.mul, operator.and_, operator.or_, operator.xor)


def overload(
    packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """Return the overload of ``packet`` that torch chooses for the arguments, and these; None if none fits.

    Args:
        packet: the operator's overloads.
        args: nodes with abstract values, and plain values.
        kwargs: the same by name.
    """
    for some_args, some_kwargs in _spellings(packet, args, kwargs):
        try:
            given = map_arg((some_args, some_kwargs), value)
            name = torch._C._jit_resolve_packet(str(packet._qualified_op_name), *given[0], **given[1])
        except Exception:  # torch raises RuntimeError or TypeError, and whatever a conversion raises
            continue
        return getattr(packet, name or "default"), some_args, some_kwargs
    return None


def _spellings(
    packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    named = {_KEYWORDS.get(name, name): arg for name, arg in kwargs.items()}
    if "out" in named and named["out"] is None:
        del named["out"]
    for spelled in dict.fromkeys((tuple(kwargs), tuple(named))):
        given = dict(zip(spelled, named.values(), strict=True)) if len(spelled) == len(named) else named
        yield args, given
        for name in packet.overloads():
            yield _lists(getattr(packet, name), args, given)
        for start in (1, 0):  # x.view(2, 3), torch.zeros(2, 3)
            if len(args) > start and all(_is_number(arg) for arg in args[start:]):
                yield (*args[:start], list(args[start:])), given


def _is_number(arg: Any) -> bool:
    return type(arg) is int or (isinstance(arg, fx.Node) and isinstance(value(arg), int))


def _lists(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat a single number if the operator takes several, as for the sizes of a square kernel."""
    arguments: Any = target._schema.arguments
    counts = {a.name: a.N for a in arguments if "List[int]" in str(a.type)}
    names = [a.name for a in target._schema.arguments]

    def spelled(name: str, arg: Any) -> Any:
        return [arg] * (counts[name] or 1) if name in counts and _is_number(arg) else arg

    spread = tuple(spelled(name, arg) for name, arg in zip(names, args, strict=False))
    return (*spread, *args[len(spread) :]), {name: spelled(name, arg) for name, arg in kwargs.items()}


def reflected(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Turn ``2 - x`` into the method of ``x`` that Python calls for it; return other calls unchanged."""
    if len(args) != 2 or isinstance(args[0], (fx.Proxy, torch.Tensor)):
        return function, args
    if function in _SYMMETRIC:
        return function, (args[1], args[0])
    if function in _REFLECTED:
        return getattr(torch.Tensor, _REFLECTED[function]), (args[1], args[0])
    return function, args
