"""Operator schemas, read once and cached, because torch makes a schema's Python objects anew at each access."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch._ops import OpOverload

__all__ = ["Schema", "schema"]

_NUMBERS = ("Tensor", "number", "float")


@dataclass(frozen=True)
class Schema:
    """Names of an operator's arguments.

    Attributes:
        names: all of them, in order.
        numbers: those that take a tensor or a scalar; no sizes, dimensions or counts.
        written: those that the operator writes into.
        shared: those that an output may share storage with.
    """

    names: tuple[str, ...]
    numbers: frozenset[str]
    written: frozenset[str]
    shared: frozenset[str]


@lru_cache(maxsize=4096)
def schema(op: OpOverload) -> Schema:
    """Read the schema of ``op``."""
    said = op._schema
    arguments = said.arguments
    aliases = {a.name: a.alias_info for a in arguments if a.alias_info is not None}
    gives_alias = any(r.alias_info is not None for r in said.returns)
    return Schema(
        names=tuple(a.name for a in arguments),
        numbers=frozenset(a.name for a in arguments if _type(a.type) in _NUMBERS),
        written=frozenset(name for name, alias in aliases.items() if said.is_mutable and alias.is_write),
        shared=frozenset(aliases if gives_alias else ()),
    )


def _type(found: object) -> str:
    return str(found).replace("Optional[", "").rstrip("]")
