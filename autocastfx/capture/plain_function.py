"""A plain function of tensors as a module, which holds nothing: what the function reads around it, guards watch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import fx, nn

from autocastfx.errors import UnsupportedError
from autocastfx.graph.node import line_of


class FunctionModule(nn.Module):
    """A module without parameters whose ``forward`` is a function. :func:`as_module` makes a class for each."""

    function: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function, by its name: the class is made anew."""
        return as_module, (type(self).function,)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModule:
        made = memo[id(self)] = as_module(type(self).function)
        made.training = self.training
        return made

    def refuse_trained(self, held: Mapping[str, torch.Tensor], graph: fx.Graph) -> None:
        """Refuse a graph of the function that reads tensors which need gradients from around it.

        Args:
            held: what the graph reads that is no argument, by its name.
            graph: the graph.

        Raises:
            UnsupportedError: it is one.
        """
        for name, tensor in held.items():
            if tensor.requires_grad:
                readers = (
                    user for node in graph.find_nodes(op="get_attr") if node.target == name for user in node.users
                )
                what = f"{list(tensor.shape)}, at {next((line_of(user) for user in readers), name)}"
                raise UnsupportedError(
                    f"the function {type(self).__name__} reads a tensor from around it that requires a gradient "
                    f"({what}). A function has no parameters, so no optimizer, state_dict or .to(device) of the result "
                    "would reach it. Write the function as the forward of an nn.Module that holds the tensor, or the "
                    "module that it is a parameter of, and convert that; or pass it in as an argument."
                )


def is_function(value: object) -> bool:
    """True for functions of Python, methods bound to an object, ``functools.partial`` of these, and torch's own."""
    value = _without_arguments(value)
    if isinstance(value, BuiltinFunctionType):  # those of Python compute with no tensors
        return str(value.__module__ or type(value.__self__).__module__).startswith("torch")
    return isinstance(value, (FunctionType, MethodType))


def _without_arguments(function: object) -> Any:
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return function


def as_module(function: Callable[..., Any]) -> FunctionModule:
    """Return a module whose ``forward`` is ``function``.

    Raises:
        UnsupportedError: the function is a method of a module, or compiled by ``torch.compile``.
    """
    plain = _without_arguments(function)
    name = str(plain.__name__)
    if hasattr(plain, "_torchdynamo_orig_callable"):
        raise UnsupportedError(
            f"the function {name} is compiled by torch.compile already: convert the function itself, and compile the "
            "result."
        )
    if isinstance(owner := getattr(plain, "__self__", None), nn.Module):
        raise UnsupportedError(
            f"{name} is a method of a {type(owner).__name__}, whose parameters it reads: convert the module, if the "
            f"method is its forward, or else an nn.Module whose forward calls {name} and which holds the module."
        )
    held = staticmethod(function)
    namespace = {
        "__module__": getattr(function, "__module__", None) or __name__,
        "__doc__": function.__doc__,
        "function": held,
        "forward": held if _has_signature(function) else staticmethod(_taking_all(function)),
    }
    return type(name if name.isidentifier() else "function", (FunctionModule,), namespace)()


def _has_signature(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function)
    except ValueError:  # it is written in C, and tells none
        return False
    return True


def _taking_all(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward
