"""The arguments of ops: names and types, and the values that a node passes, defaults included."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.operator_schemas import get_signature_for_torch_op

from autocastfx.graph.op_name import located, names_function, op_name

__all__ = ["ArgumentType", "argument_types", "arguments"]


@dataclass(frozen=True)
class ArgumentType:
    """The type of an argument, as its schema has it: ``float``, ``Optional[ScalarType]``, ``List[int]``."""

    name: str

    @property
    def is_optional(self) -> bool:
        """True if the argument may be null."""
        return self.name.startswith("Optional[")

    @property
    def base(self) -> str:
        """The type of its value, or of each member of its list."""
        name = self.name
        for wrapper in ("Optional[", "List["):
            if name.startswith(wrapper):
                name = name[len(wrapper) : -1]
        return name


@lru_cache(maxsize=4096)
def argument_types(op: str) -> Mapping[str, tuple[ArgumentType, ...]] | None:
    """Return the types of each argument of ``op`` over its overloads, by the argument's name.

    For a Python function the types are empty. None if the op's arguments are unknown.
    """
    found: dict[str, dict[ArgumentType, None]] = {}
    if names_function(op):
        function = located(op)
        try:
            names = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
        except (TypeError, ValueError):
            names = []
        return MappingProxyType(dict.fromkeys(names, ())) if names else None
    schemas = _schemas(op)
    for schema in schemas:
        for argument in schema.arguments:
            found.setdefault(argument.name, {})[ArgumentType(str(argument.real_type))] = None
    return MappingProxyType({name: tuple(types) for name, types in found.items()}) if schemas else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name, with defaults for those not given.

    If the names are unknown, positional arguments are left out.
    """
    if isinstance(node.target, OpOverload):
        return _bound(node, node.target._schema)
    for signature in _signatures(node.target):
        try:
            bound = signature.bind(*node.args, **node.kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        return dict(bound.arguments)
    fitting = (schema for schema in _schemas(op_name(node)) if _fits(node, schema))
    return next((_bound(node, schema) for schema in fitting), dict(node.kwargs))


def _schemas(op: str) -> list[Any]:
    return torch._C._jit_get_schemas_for_operator(op if "::" in op else f"aten::{op}")


def _signatures(target: Any) -> list[inspect.Signature]:
    if inspect.isfunction(target):
        return [inspect.signature(target)]
    return get_signature_for_torch_op(target) or [] if inspect.isbuiltin(target) else []


def _bound(node: fx.Node, schema: Any) -> dict[str, Any]:
    found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    found.update({a.name: given for a, given in zip(schema.arguments, node.args, strict=False)})
    return {**found, **node.kwargs}


def _fits(node: fx.Node, schema: Any) -> bool:
    """True if the node's arguments fit this overload by position and name."""
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    given = {*positional[: len(node.args)], *node.kwargs}
    required = {a.name for a in schema.arguments if not a.has_default_value()}
    return len(node.args) <= len(positional) and required <= given <= {a.name for a in schema.arguments}
