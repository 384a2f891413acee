"""Capture ``int(tensor)`` and ``float(tensor)`` in a model's code as numbers that the graph computes in each call."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autocastfx.capture.call_rules import Rule
from autocastfx.capture.failure import AgainError, calling_frame

__all__ = ["CarriedNumbers"]

_READS = {Tensor.__int__: "int", Tensor.__float__: "float"}


class CarriedNumbers:
    """The places where ``int`` and ``float`` read tensors: the globals of the functions that call them.

    Python's own return a plain number, which a tracer cannot follow. During a capture the names there stand for classes
    that return the symbol of ``tensor.item()``, and behave as Python's own with other arguments.
    """

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], dict[str, Any]] = {}

    @contextmanager
    def carried(self) -> Generator[None, None, None]:
        """While open, ``int`` and ``float`` stand for these classes in all places."""
        with ExitStack() as stack:
            for (_, name), table in self.places.items():
                table[name] = _STAND_INS[name]
                stack.callback(table.pop, name, None)
            yield

    def add(self, frame: FrameType, name: str) -> bool:
        """Add the globals of ``frame``, whose code calls ``name``.

        False, and nothing added, if they are known, define ``name`` themselves, or compare types by identity.
        """
        table, key = frame.f_globals, (id(frame.f_globals), name)
        if key in self.places or name in table or _compares(frame.f_code, name):
            return False
        self.places[key] = table
        return True

    def rules(self) -> Mapping[Any, Rule]:
        """Return rules that add the places where ``int`` or ``float`` reads a tensor, and raise AgainError there."""
        return {read: partial(self._read, read) for read in _READS}

    def _read(self, read: Any, x: Tensor) -> Any:
        if get_proxy_mode() is not None and self.add(calling_frame(), _READS[read]):
            raise AgainError
        return read(x)


def _compares(code: CodeType, name: str) -> bool:
    """True if the module of ``code`` has a comparison such as ``type(x) is int``, or no readable source."""
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError, ValueError):
        return True
    comparisons = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    by_identity = (c for c in comparisons if any(isinstance(op, (ast.Is, ast.IsNot)) for op in c.ops))
    return any(isinstance(side, ast.Name) and side.id == name for c in by_identity for side in (c.left, *c.comparators))


class _Alike(type):
    """Metaclass of stand-ins for ``int`` and ``float``: only calls with a traced tensor or number differ."""

    builtin: type
    carry: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        symbolic = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        if len(args) == 1 and not kwargs and isinstance(args[0], symbolic) and get_proxy_mode() is not None:
            return cls.carry(args[0])
        return cls.builtin(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.builtin)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.builtin)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.builtin

    def __hash__(cls) -> int:
        return hash(cls.builtin)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.builtin, name)


def _whole(value: Any) -> Any:
    """Return the value rounded toward 0, as Python does."""
    if isinstance(value, Tensor):
        return (value if value.dtype in _INTEGERS else value.to(torch.int64)).item()
    return torch.sym_int(value)


def _real(value: Any) -> Any:
    return torch.sym_float(value.item() if isinstance(value, Tensor) else value)


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_STAND_INS = {
    "int": _Alike("int", (), {"builtin": int, "carry": staticmethod(_whole)}),
    "float": _Alike("float", (), {"builtin": float, "carry": staticmethod(_real)}),
}
