"""Names of ops as op lists write them, and the names, types and values of their arguments."""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.operator_schemas import get_signature_for_torch_op

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)

# Canonical op names of fx nodes, the names used in op lists.

# The ATen ops behind Python's operators on tensors, by the names of both where these differ.
_ATENS = {
    **{"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "pos": "positive", "and_": "bitwise_and"},
    **{"or_": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not"},
    **{"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"},
}
_ASSIGNING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")  # as in x += y
_OTHERS = ("matmul", "neg", "pos", "abs", "invert", "lshift", "rshift", "getitem", "setitem")
_OPERATORS: dict[Any, str] = {
    **{getattr(operator, n): _ATENS.get(n, n) for n in (*_ASSIGNING, *_OTHERS, "eq", "ne", "lt", "le", "gt", "ge")},
    **{getattr(operator, f"i{n.rstrip('_')}"): f"{_ATENS.get(n, n)}_" for n in _ASSIGNING},
}


def _has_aten(name: str) -> bool:
    return hasattr(torch.ops.aten, name)


def of_function(function: Any) -> str:
    """Return the op name of a callable: the ATen base name, ``namespace::op``, or a dotted path.

    An operator of this package named like one of ATen's has ATen's name.
    """
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        return _of_packet(function)
    if isinstance(function, HigherOrderOperator):
        return function.name()
    if function in _OPERATORS:
        return _OPERATORS[function]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and function.__name__ == "apply":  # autograd.Function.apply
        return f"{owner.__module__}.{owner.__qualname__}"
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", repr(function))
    in_torch = module.split(".")[0] in ("torch", "")
    if in_torch and name.rpartition(".")[2].startswith("__"):  # Tensor.__add__ is operator.add
        spelled = getattr(operator, function.__name__, None)
        if spelled in _OPERATORS:
            return _OPERATORS[spelled]
    if in_torch and "." not in name and _has_aten(name):
        return name
    if in_torch and _has_aten(getattr(function, "__name__", name)):  # Tensor methods: 'Tensor.add', '_TensorBase.add'
        return str(function.__name__)
    return f"{module}.{name}" if module else name


@lru_cache(maxsize=4096)
def _of_packet(packet: OpOverloadPacket) -> str:
    namespace, _, name = str(packet._qualified_op_name).partition("::")
    is_atens = namespace == "aten" or (namespace == "autocastfx" and _has_aten(name))
    return name if is_atens else f"{namespace}::{name}"


def names_function(op: str) -> bool:
    """True for a dotted path of a Python function or class; false for the name of an operator."""
    return "." in op and "::" not in op


def op_name(node: fx.Node) -> str:
    """Return the op name of ``node``: ``linear``, ``my_lib::fused`` or ``package.module.function``.

    For placeholders, attributes and outputs, and for calls of modules, which capture leaves in no graph, the name is
    their kind.
    """
    if node.op == "call_function":
        return of_function(node.target)
    if node.op == "call_method":
        return str(node.target)
    return node.op


def overload_name(node: fx.Node) -> str:
    """Return op and overload of ``node`` (``mm.dtype``, ``mm.default``); empty if it is not an ATen op."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ""
    return f"{of_function(node.target)}.{node.target._overloadname}"


def kernel_name(node: fx.Node) -> str:
    """Return the name of ``node`` in the kernel facts: the base name, or ``autocastfx::op`` for our own operators."""
    if isinstance(node.target, OpOverload) and node.target.namespace == "autocastfx":
        return str(node.target._schema.name)
    return base_name(op_name(node))


def base_name(name: str) -> str:
    """Return the out-of-place name of an in-place op (``add_`` → ``add``); other names unchanged."""
    is_in_place = name.endswith("_") and not name.endswith("__") and len(name) > 1
    return name[:-1] if is_in_place else name


def located(path: str) -> Any:
    """Look a dotted path up in loaded modules, without importing; None if nothing is found."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        target: Any = sys.modules.get(".".join(parts[:n]))
        if target is not None:
            for part in parts[n:]:
                is_class = isinstance(target, type)
                target = getattr(target, part, None) if is_class else getattr(target, "__dict__", {}).get(part)
            return target
    return None


def canonical(path: str) -> str:
    """Return the op name for a dotted path; the path itself if no loaded module holds it.

    ``torch.nn.LayerNorm`` becomes the path where it is defined, ``torch.relu`` becomes ``relu``, and what
    ``torch.library.custom_op`` made becomes ``namespace::op``.
    """
    return named(located(path)) or path


def named(target: object) -> str | None:
    """Return the op name of a function, an operator or a class; None for anything else."""
    if isinstance(target, type):
        return f"{target.__module__}.{target.__qualname__}"
    target = target._opoverload if isinstance(target, CustomOpDef) else target
    return of_function(target) if isinstance(target, (*FUNCTIONS, OpOverload, OpOverloadPacket)) else None


# The arguments of ops: names and types, and the values that a node passes, defaults included.


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
    types_by_name: dict[str, dict[ArgumentType, None]] = {}
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
            types_by_name.setdefault(argument.name, {})[ArgumentType(str(argument.real_type))] = None
    return MappingProxyType({name: tuple(types) for name, types in types_by_name.items()}) if schemas else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name, with defaults for those not given.

    If the names are unknown, positional arguments are left out.
    """
    if isinstance(node.target, OpOverload):
        return _by_name(node, node.target._schema)
    for signature in _signatures(node.target):
        try:
            bound = signature.bind(*node.args, **node.kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        return dict(bound.arguments)
    fitting = (schema for schema in _schemas(op_name(node)) if _fits(node, schema))
    return next((_by_name(node, schema) for schema in fitting), dict(node.kwargs))


def _schemas(op: str) -> list[Any]:
    return torch._C._jit_get_schemas_for_operator(op if "::" in op else f"aten::{op}")


def _signatures(target: Any) -> list[inspect.Signature]:
    if inspect.isfunction(target):
        return [inspect.signature(target)]
    return get_signature_for_torch_op(target) or [] if inspect.isbuiltin(target) else []


def _by_name(node: fx.Node, schema: Any) -> dict[str, Any]:
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values.update({a.name: given for a, given in zip(schema.arguments, node.args, strict=False)})
    return {**values, **node.kwargs}


def _fits(node: fx.Node, schema: Any) -> bool:
    """True if the node's arguments fit this overload by position and name."""
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    given = {*positional[: len(node.args)], *node.kwargs}
    required = {a.name for a in schema.arguments if not a.has_default_value()}
    return len(node.args) <= len(positional) and required <= given <= {a.name for a in schema.arguments}
