"""Keep a number that changes from call to call an input of the graph where an operator's schema asks for a ``float``.

Such a number is symbolic while it is captured, and torch's bindings would fix it, as the probability of a dropout or
the momentum of a batch norm: there would be a graph for each number. No operator here makes sizes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import patched_here

Record = Callable[[OpOverload, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
_OF_C = (BuiltinFunctionType, MethodDescriptorType)
_MAKES_SIZES = "upsample"  # in the names of operators whose sizes depend on their numbers


@contextmanager
def keeping_floats(record: Record | None = None) -> Generator[None]:
    """While open, call operators with the present numbers in the place of symbolic ones, and fix none.

    Args:
        record: called in the place of an operator, with its overload, what runs it so, and its own arguments; None:
            such operators run.
    """
    with ExitStack() as stack:
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            stack.enter_context(patched_here(functional, name, _no))  # they go on to the operators
        stack.enter_context(_KeptFloats(record))
        yield


class _KeptFloats(TorchFunctionMode):
    def __init__(self, record: Record | None) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        overload = _taking_floats(func, args, kwargs)
        if overload is None:
            return func(*args, **kwargs)
        given, named = pytree.tree_map_only(torch.SymFloat, _present, (args, kwargs))
        run = partial(func, *given, **named)
        return run() if self.record is None else self.record(overload, run, args, kwargs)


def _no(*_: object) -> bool:
    return False


def _present(number: Any) -> float:
    return number.node.hint


def _taking_floats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
    """Return the overload of a call that is given symbolic numbers for floats, and for nothing else; None otherwise."""
    numbers = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.SymFloat)]
    if not numbers or any(number.node.hint is None for number in numbers):
        return None
    name = str(func.__name__) if isinstance(func, _OF_C) else ""
    overload: Any = getattr(getattr(torch.ops.aten, name, None), "default", None) if name else None
    if overload is None or _MAKES_SIZES in name:
        return None
    arguments = overload._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    if len(args) > sum(not argument.kwarg_only for argument in arguments) or not kwargs.keys() <= by_name.keys():
        return None
    given = [*zip(arguments, args, strict=False), *((by_name[name], one) for name, one in kwargs.items())]
    kinds = [str(argument.real_type) for argument, one in given if isinstance(one, torch.SymFloat)]
    return overload if all(kind in ("float", "Optional[float]") for kind in kinds) else None


@contextmanager
def floats_kept() -> Generator[None]:
    """While open, let Dynamo find the results of operators without fixing their numbers, and ints as it does floats."""
    from torch._dynamo import utils

    run_node = cast("Any", utils.run_node)

    @wraps(run_node)
    def run(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        if any(isinstance(one, torch.SymFloat) for one in (*args, *kwargs.values())):
            with keeping_floats():
                return run_node(tracer, node, args, kwargs, nnmodule)
        return run_node(tracer, node, args, kwargs, nnmodule)

    with patch.object(utils, "run_node", run), torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        yield
