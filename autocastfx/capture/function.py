"""A plain function of tensors as a module, and what the function reads from around it."""

from __future__ import annotations

import dis
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from autocastfx.capture.python_state import Live, is_plain, plain_parts
from autocastfx.errors import CaptureError, UnsupportedError

_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")
_OWN = ("torch", "autocastfx", "numpy")  # libraries whose own functions hold no state of a user's
_SPACES = (SimpleNamespace, Namespace)  # of Python's library, but what is in them is a user's
_MOST = 1_000  # objects that are looked at; what is behind them, capture itself finds if it takes gradients
_WHAT_TO_DO = (
    "A function has no parameters, so {0} would be a constant without a gradient, and no optimizer, state_dict or "
    ".to(device) of the result would reach it. Write the function as the forward of an nn.Module that holds {0}, and "
    "convert that; or pass the tensors in as arguments."
)


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


def is_function(value: object) -> bool:
    """True for functions of Python, methods bound to an object, ``functools.partial`` of these, and torch's own."""
    if isinstance(value, partial):
        return is_function(cast("partial[Any]", value).func)
    if isinstance(value, BuiltinFunctionType):  # those of Python compute with no tensors
        return str(value.__module__ or type(value.__self__).__module__).startswith("torch")
    return isinstance(value, (FunctionType, MethodType))


def as_module(function: Callable[..., Any]) -> FunctionModule:
    """Return a module whose ``forward`` is ``function``, with its signature.

    Numbers, texts and the like that the function and those that it calls read from around it (globals and closures) are
    attributes of the module: what is captured holds for their present values.

    Raises:
        UnsupportedError: the function is a method of a module, or compiled by ``torch.compile``; or it reads a module,
            or a tensor that requires a gradient, from around it.
    """
    name = _name(function)
    if hasattr(function, "_torchdynamo_orig_callable"):
        raise UnsupportedError(
            f"the function {name} is compiled by torch.compile already: convert the function itself, and compile the "
            "result."
        )
    live: dict[str, Live] = {}
    kept: dict[str, Any] = {}
    for found in _around(function):
        _refuse(name, found)
        if is_plain(found.value) and found.read is not None:
            live[found.path] = Live(found.read)
        elif found.read is not None and not isinstance(found.value, ModuleType) and plain_parts(found.value):
            kept[found.path] = found.value
    taken = {*dir(nn.Module()), "function"}
    attributes = {path: f"{path}_" if path in taken else path for path in (*live, *kept)}

    signature = _signature(function)

    def forward(self: FunctionModule, *args: Any, **kwargs: Any) -> Any:
        for attribute in attributes.values():
            getattr(self, attribute)  # which notes that the graph depends on it
        call = signature.bind(*args, **kwargs)  # by position what may be: torch.vmap maps over no others
        return function(*call.args, **call.kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])
    namespace = {
        **{attributes[path]: value for path, value in live.items()},
        "__module__": getattr(function, "__module__", None) or __name__,
        "__doc__": function.__doc__,
        "forward": forward,
        "function": staticmethod(function),
    }
    module = type(name if name.isidentifier() else "function", (FunctionModule,), namespace)()
    module.__dict__.update({attributes[path]: value for path, value in kept.items()})
    return module


def _name(function: Any) -> str:
    return _name(cast("partial[Any]", function).func) if isinstance(function, partial) else str(function.__name__)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function; of one that is written in C and tells none, any."""
    try:
        return inspect.signature(function)
    except ValueError:
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds.items()])


# What a function reads from around it: closures, globals, defaults, what it is bound to, and so on from there.


class _Found(NamedTuple):
    """An object that a function reaches.

    Attributes:
        path: how, as ``helper.scale``.
        value: the object.
        read: reads it again; None if it cannot be another one without a change of what holds it.
    """

    path: str
    value: Any
    read: Callable[[], Any] | None = None


def _around(function: Callable[..., Any]) -> Iterator[_Found]:
    """Yield what a function reads from around it, each object once; plain values at each place."""
    seen = {id(function)}
    due = list(_inside(_Found("", function), frozenset()))
    for _ in range(_MOST):
        if not due:
            return
        found, names = due.pop(0)
        if is_plain(found.value):
            yield found
        elif id(found.value) not in seen:
            seen.add(id(found.value))
            yield found
            if not isinstance(found.value, (nn.Module, torch.Tensor)):
                due += _inside(found, names)


_Reached = Generator[tuple[_Found, frozenset[str]]]


def _inside(found: _Found, names: frozenset[str]) -> _Reached:
    """Yield what is inside of an object, as far as code that reads ``names`` may reach it, and what reads it there."""
    value = found.value
    if isinstance(value, partial):
        bound = cast("partial[Any]", value)
        yield _Found(_joined(found.path, "func"), bound.func), names
        for key, one in (*enumerate(bound.args), *bound.keywords.items()):
            yield _Found(_joined(found.path, str(key)), one), names
    elif isinstance(value, MethodType):
        yield _Found(_joined(found.path, "self"), value.__self__), names
        yield _Found(found.path, value.__func__), names
    elif isinstance(value, FunctionType):
        yield from _of_function(found.path, value)
    elif isinstance(value, Mapping):
        for key, one in list(cast("Mapping[Any, Any]", value).items()):
            yield _Found(f"{found.path}[{key!r}]", one), names
    elif isinstance(value, (list, tuple, set, frozenset)):
        for key, one in enumerate(cast("list[Any]", value)):
            yield _Found(f"{found.path}[{key}]", one), names
    elif isinstance(value, (ModuleType, *_SPACES)) or not _is_of_library(type(value).__module__):
        yield from _of_namespace(found.path, value, names)


def _of_function(path: str, function: FunctionType) -> _Reached:
    read = frozenset(_names(function.__code__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if (content := _content(cell)) is not _EMPTY:
            yield _Found(_joined(path, name), content, partial(_content, cell)), read
    for name, one in inspect.signature(function).parameters.items():
        if one.default is not one.empty and not is_plain(one.default):  # a plain one is part of the signature
            yield _Found(_joined(path, name), one.default), read
    if not _is_of_library(function.__module__):
        table = function.__globals__
        for name in sorted(read & table.keys()):
            yield _Found(_joined(path, name), table[name], partial(table.get, name)), read


def _of_namespace(path: str, value: Any, names: frozenset[str]) -> _Reached:
    """Yield the attributes of an object, or those of a module or a class that the code names."""
    if isinstance(value, (ModuleType, type)):
        if _is_of_library(value.__name__ if isinstance(value, ModuleType) else value.__module__):
            return
        table = {name: one for name, one in vars(value).items() if name in names}
    else:
        table = dict[str, Any](getattr(value, "__dict__", {}))
        for kind in type(value).__mro__[:-1]:
            methods = {name: one for name, one in vars(kind).items() if isinstance(one, FunctionType)}
            table = {name: one for name, one in methods.items() if name in names or name == "__call__"} | table
    for name, one in table.items():
        yield _Found(_joined(path, name), one, partial(getattr, value, name, None)), names


_EMPTY = object()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return _EMPTY


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code, and the functions in it, read."""
    for one in dis.get_instructions(code):
        if one.opname in _NAMES:
            yield str(one.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_library(module: str | None) -> bool:
    root = str(module).partition(".")[0]
    return root in _OWN or root in sys.stdlib_module_names - {"__main__"}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# What a function may not read.


def _refuse(name: str, found: _Found) -> None:
    """Refuse what a graph of a function would freeze.

    Raises:
        UnsupportedError: the object is one.
    """
    value = found.value
    if isinstance(value, nn.Module) and found.path == "self":
        raise UnsupportedError(
            f"{name} is a method of a {type(value).__name__}, whose parameters it reads: convert the module, if the "
            f"method is its forward, or else an nn.Module whose forward calls {name} and which holds the module."
        )
    if isinstance(value, nn.Module) and not _is_stateless(value):
        what = f"the module {found.path} ({type(value).__name__})"
        if not any(True for _ in (*value.parameters(), *value.buffers())):
            raise UnsupportedError(
                f"the function {name} calls {what}, which has a mode of its own or code that is not torch's: train() "
                f"and eval() of the result would not reach it. Write the function as the forward of an nn.Module that "
                f"holds {found.path}, and convert that; or call a function such as torch.nn.functional.dropout."
            )
        raise UnsupportedError(f"the function {name} calls {what}. {_WHAT_TO_DO.format(found.path)}")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise UnsupportedError(
            f"the function {name} reads the tensor {found.path}, which requires a gradient. "
            f"{_WHAT_TO_DO.format(found.path)}"
        )


def _is_stateless(module: nn.Module) -> bool:
    """True for torch's modules that hold no tensors, and compute the same in training and evaluation: losses, GELU."""
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return False
    codes = [getattr(type(one).forward, "__code__", None) for one in module.modules()]
    are_torchs = all(type(one).__module__.startswith("torch.nn.modules.") for one in module.modules())
    return are_torchs and all(code is not None and "training" not in code.co_names for code in codes)


def refuse_constants(module: FunctionModule, constants: Mapping[str, Any]) -> None:
    """Refuse a captured function whose graph holds a tensor that requires a gradient, however it came to it.

    Raises:
        CaptureError: it does.
    """
    for one in constants.values():
        if isinstance(one, torch.Tensor) and one.requires_grad:
            size = list(one.shape)
            raise CaptureError(
                f"the function {_name(module.function)} reads a tensor of size {size} from around it, which requires a "
                f"gradient. {_WHAT_TO_DO.format('the tensor')}"
            )
