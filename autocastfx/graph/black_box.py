"""Find nodes that run code outside the graph. Such code may have side effects that no schema declares."""

from __future__ import annotations

import types

from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["is_opaque"]

_NAMESPACES = ("aten", "prim", "prims", "autocastfx")
_PACKAGES = ("torch", "autocastfx", "math", "operator", "_operator", "builtins")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


def is_opaque(node: fx.Node) -> bool:
    """True if ``node`` calls a module, a custom operator, an ``autograd.Function``, or a function of a third party.

    Functions of torch and of Python's ``math`` and ``operator`` are not opaque, nor are sub-graphs.
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
