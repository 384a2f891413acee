"""Nodes that run code of which a graph shows nothing: it may change what its owner holds, whatever its schema says."""

from __future__ import annotations

import types

from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["is_opaque"]

_NAMESPACES = ("aten", "prim", "prims", "autocastfx")
_PACKAGES = ("torch", "autocastfx", "math", "operator", "_operator", "builtins")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


def is_opaque(node: fx.Node) -> bool:
    """Whether ``node`` calls a module, a custom operator, or a function that is neither torch's nor Python's.

    An ``autograd.Function`` is such a one, too. Sub-graphs are not.
    """
    target = node.target
    if node.op == "call_module":
        return True
    if node.op != "call_function" or isinstance(target, HigherOrderOperator):
        return False
    if isinstance(target, OpOverload):
        return target.namespace not in _NAMESPACES
    if not isinstance(target, _FUNCTIONS) or isinstance(getattr(target, "__self__", None), type):
        return True
    module = getattr(target, "__module__", None)
    return module is not None and module.split(".")[0] not in _PACKAGES
