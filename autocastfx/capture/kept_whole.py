"""Keep calls of Python functions whole where Dynamo captures them: one node for each, which calls the function.

What a list names is kept so, and every autograd function of a user's in a view. Dynamo itself traces into functions,
and of an autograd function it keeps no name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch

from autocastfx.capture.torch_modules import note_call, written_out
from autocastfx.capture.whole_calls import AutogradCall
from autocastfx.graph.names import FUNCTIONS, located


class _Kept(threading.local):
    """What a thread that captures keeps whole.

    Attributes:
        functions: Python functions, and classes of autograd functions.
        are_all: true if this holds for all autograd functions but torch's own.
    """

    functions: Collection[Any] = ()
    are_all = False


_KEPT = _Kept()


def functions_at(paths: Iterable[str]) -> frozenset[Any]:
    """Return the functions, and the classes of autograd functions, that are at the dotted ``paths``."""
    found = map(located, paths)
    return frozenset(one for one in found if isinstance(one, FUNCTIONS) or _is_autograd_function(one))


def _is_autograd_function(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


@contextmanager
def keeping_whole(functions: Collection[Any], *, autograd: bool = False) -> Generator[None]:
    """While open, keep calls of ``functions`` whole that this thread captures.

    Args:
        functions: of :func:`functions_at`.
        autograd: all autograd functions besides, but torch's own and those that get what is no input of a graph.
    """
    before = _KEPT.functions, _KEPT.are_all
    _KEPT.functions, _KEPT.are_all = functions, autograd
    try:
        yield
    finally:
        _KEPT.functions, _KEPT.are_all = before


def are_kept(functions: Collection[Any]) -> bool:
    """True if :func:`keeping_whole` is open in this thread for all of these."""
    return all(one in _KEPT.functions for one in functions)


def keeping_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name."""
    from torch._dynamo.variables import SkipFunctionVariable, TorchInGraphFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable

    user: Any = UserFunctionVariable.call_function
    call: Any = AutogradFunctionVariable.call_apply

    @wraps(user)
    def call_user(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if _KEPT.functions and self.fn in _KEPT.functions:
            return _call_named(tx, self.fn, [*self.self_args(), *args], kwargs)
        note_call(self.fn, [*self.self_args(), *args], kwargs)
        other = written_out(self.fn, args, kwargs)
        return user(self if other is None else UserFunctionVariable(other), tx, args, kwargs)

    @wraps(call)
    def call_apply(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        function = self.fn_cls
        if cast("Any", torch._C)._functorch.peek_interpreter_stack() is not None:
            raise _unsupported("an autograd function inside a transform of torch.func, whose backward would be lost")
        if function in _KEPT.functions:
            return _call_named(tx, AutogradCall(function), args, kwargs)
        given = _proxies(args, kwargs) if _KEPT.are_all and not function.__module__.startswith("torch.") else None
        return call(self, tx, args, kwargs) if given is None else _call_whole(tx, AutogradCall(function), *given)

    method: Any = TensorVariable.call_method

    @wraps(method)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        other = written_out(getattr(torch.Tensor, name, None), args, kwargs)
        if other is not None:
            return UserFunctionVariable(other).call_function(tx, [self, *args], kwargs)
        return method(self, tx, name, args, kwargs)

    return [
        (TensorVariable, "call_method", call_method),
        (UserFunctionVariable, "call_function", call_user),
        (TorchInGraphFunctionVariable, "call_function", _keeping(TorchInGraphFunctionVariable.call_function)),
        (SkipFunctionVariable, "call_function", _keeping(SkipFunctionVariable.call_function)),
        (AutogradFunctionVariable, "call_apply", call_apply),
    ]


def _keeping(before: Any) -> Any:
    from torch._dynamo.variables import UserFunctionVariable

    @wraps(before)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if _KEPT.functions and self.value in _KEPT.functions:
            return _call_named(tx, self.value, args, kwargs)
        if (other := written_out(self.value, args, kwargs)) is not None:
            return UserFunctionVariable(other).call_function(tx, args, kwargs)
        return before(self, tx, args, kwargs)

    return call_function


def _unsupported(said: str) -> Exception:
    from torch._dynamo.exc import Unsupported

    return cast("Any", Unsupported)(said)


def _call_named(tx: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a call of a function that a list names.

    Raises:
        Unsupported: an argument is no input of a graph.
    """
    if (given := _proxies(args, kwargs)) is None:
        named = f"{function.__module__}.{function.__qualname__}"
        raise _unsupported(
            f"an op list names {named}, and this call of it gets an object that is neither tensor nor number"
        )
    return _call_whole(tx, function, *given)


def _proxies(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the arguments of a call as inputs of a node; None if one cannot be that."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.utils import proxy_args_kwargs

    try:
        return proxy_args_kwargs(args, kwargs)
    except Unsupported:
        return None


def _call_whole(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    from torch._dynamo.utils import get_fake_value

    proxy = tx.output.create_proxy("call_function", function, args, kwargs)
    return _known(tx, proxy, get_fake_value(proxy.node, tx, allow_non_graph_fake=True))


def _known(tx: Any, proxy: Any, value: Any) -> Any:
    """Return what Dynamo knows of the result of a call: the nesting, with tensors and constants in it."""
    from torch._dynamo.variables import ConstantVariable, builder, dicts, lists

    if isinstance(value, dict):
        items = {ConstantVariable.create(key): _known(tx, proxy[key], one) for key, one in value.items()}
        return dicts.ConstDictVariable(items, dict)
    if type(value) in (list, tuple):
        kind = lists.ListVariable if isinstance(value, list) else lists.TupleVariable
        return kind([_known(tx, proxy[i], one) for i, one in enumerate(value)])
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return ConstantVariable.create(value)
    return builder.wrap_fx_proxy(tx, proxy, example_value=value)
