"""Keep some calls whole in a captured graph: custom autograd functions, and functions that an op list names.

A tracer goes into them, and silently loses a custom backward. Here each call becomes one node.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import CONTAINERS, Shared, content_of, restore
from autocastfx.capture.mended import note_call, written_out
from autocastfx.graph.names import FUNCTIONS, located

# Keep some Python calls whole in a captured graph: custom autograd functions, and functions that an op list names.


# torch's attention layers in evaluation without gradients: fused, and without the padded places of a sequence.


@contextmanager
def _attention_written_out() -> Generator[None]:
    switch = torch.backends.mha.get_fastpath_enabled
    before = switch()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with patch.object(switch, "_dynamo_marked_constant", True, create=True):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# While open, torch's attention layers call the operators that lists know, as under torch.compile and in training, and
# no guard asks for the switch of that.
ATTENTION_WRITTEN_OUT = Shared(_attention_written_out)


class _Leaf(HigherOrderOperator):
    """A placeholder for a call that was not traced, until :func:`restore_leaves` puts the function in its place."""

    def __init__(self) -> None:
        super().__init__("autocastfx_leaf")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


LEAF = _Leaf()


class AutogradCall:
    """``function.apply`` as a callable with the function's name, which graphs can print, copy and pickle."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__module__, self.__name__ = function.__module__, function.__name__
        self.__qualname__ = function.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function's ``apply``; on abstract tensors, in no call of the model's, its class stays as it is."""
        if not any(isinstance(one, FakeTensor) for one in args):
            return self.function.apply(*args, **kwargs)
        held = [one for one in vars(self.function).values() if isinstance(one, CONTAINERS)]
        before = [(self.function, dict(vars(self.function))), *((one, content_of(one)) for one in held)]
        try:
            return self.function.apply(*args, **kwargs)
        finally:
            for owner, content in before:
                restore(owner, content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AutogradCall) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return (AutogradCall, (self.function,))


def record_call(
    function: Callable[..., Any],
    run: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    called: list[Callable[..., Any]],
) -> Any:
    """Record a call of ``function`` as one node of the graph being traced, if one is; ``run`` computes it.

    ``function`` is added to ``called``. :func:`restore_leaves` puts it into the graph.
    """
    mode = get_proxy_mode()
    if mode is None:
        return run()
    tracer = mode.tracer
    proxies, named = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs))
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():  # whose modes record switches of gradients
        result = run()
    called.append(function)
    proxy = tracer.create_proxy("call_function", LEAF, (len(called) - 1, *proxies), named)
    # torch fails at these
    tracked = pytree.tree_map_only((str, torch.dtype, torch.device), lambda _: None, result)
    track_tensor_tree(tracked, proxy, constant=None, tracer=tracer)
    return result


def restore_leaves(graph: fx.Graph, called: list[Callable[..., Any]]) -> None:
    """Replace each placeholder node of ``graph`` by a call of the function."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is LEAF:
            node.target, node.args = called[node.args[0]], node.args[1:]
            _erase_unread(node)


def _erase_unread(node: fx.Node) -> None:
    """Erase the members of a call's output that no node reads; tracing takes every member out of its tuple."""
    for member in list(node.users):
        if member.op == "call_function" and member.target is operator.getitem and member.args[0] is node:
            _erase_unread(member)
            if not member.users:
                member.graph.erase_node(member)


# Keep calls of Python functions whole where Dynamo captures them: one node for each, which calls the function.


class _WholeCalls(threading.local):
    """What a thread that captures keeps whole.

    Attributes:
        functions: Python functions, and classes of autograd functions.
        are_all: true if this holds for all autograd functions but torch's own.
    """

    functions: Collection[Any] = ()
    are_all = False


_KEPT = _WholeCalls()


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
        other = written_out(tx, self.fn, args, kwargs)
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
        other = written_out(tx, getattr(torch.Tensor, name, None), args, kwargs)
        if other is not None:
            return UserFunctionVariable(other).call_function(tx, [self, *args], dict(kwargs))
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
        if (other := written_out(tx, self.value, args, kwargs)) is not None:
            return UserFunctionVariable(other).call_function(tx, list(args), dict(kwargs))
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
        return dicts.ConstDictVariable(items)
    if type(value) in (list, tuple):
        kind = lists.ListVariable if isinstance(value, list) else lists.TupleVariable
        return kind([_known(tx, proxy[i], one) for i, one in enumerate(value)])
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return ConstantVariable.create(value)
    return builder.wrap_fx_proxy(tx, proxy, example_value=value)
