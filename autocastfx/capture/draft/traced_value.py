"""Stand-ins for tensors and sizes in a model's code while it is traced without inputs."""

from __future__ import annotations

import dis
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TraceError

from autocastfx.capture.draft.guess import Guess
from autocastfx.graph.names import of_function
from autocastfx.graph.node import value

__all__ = ["Value", "is_tensor"]

# Properties of tensors, and the operators that compute them.
_OPERATORS = {"T": "numpy_T", "mT": "mT", "mH": "mH", "H": "matrix_H", "real": "real", "imag": "imag"}
_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")


class Value(fx.Proxy):
    """The value of a node: a tensor, a number, or several of these. Its tracer records operations on it."""

    def __init__(self, node: fx.Node, tracer: Any) -> None:
        super().__init__(node, tracer)
        self.tracer: Any = tracer

    @property
    def is_tensor(self) -> bool:
        """True if this is one tensor."""
        return isinstance(value(self.node), torch.Tensor)

    def __getattr__(self, name: str) -> Any:
        tracer = self.tracer
        if self.is_tensor:
            if name == "shape":
                return tracer.sizes(self)
            if name == "ndim":
                return tracer.rank(self)
            if name == "dtype":
                return tracer.dtype(self)
            if name == "device":
                return tracer.device
            if name in _OPERATORS:
                return tracer.call(_OPERATORS[name], (self,), {})
            if name == "layout" or (name.startswith("is_") and not callable(getattr(torch.Tensor, name, None))):
                return getattr(value(self.node), name)
        members = tracer.members(self.node)
        return self[members.index(name)] if name in members else super().__getattr__(name)

    def __getitem__(self, index: Any) -> Any:
        count = self.tracer.count(self.node)
        if isinstance(index, slice) and count is not None:
            return tuple(self[i] for i in range(count)[index])
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, new: Any) -> None:
        self.tracer.assign(self, index, new)

    def __len__(self) -> int:
        count = self.tracer.count(self.node)
        if count is None:
            raise TraceError(f"the length of {self.node.name!r} is not known")
        return count

    def __iter__(self) -> Iterator[Any]:
        count = self.tracer.count(self.node)
        if count is None:
            count = _unpacked_to(sys._getframe(1))
        return self.tracer.iter(self) if count is None else iter([self[i] for i in range(count)])

    def __index__(self) -> int:
        raise TraceError("a value is used as a plain number (a loop over a length, float(x), a list of so many)")

    __float__ = __int__ = __index__


class Sizes(Value):
    """``x.shape`` of a tensor whose number of dimensions is not known."""

    def __init__(self, node: fx.Node, tracer: Any, source: Value) -> None:
        super().__init__(node, tracer)
        self.source = source

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise TraceError(f"the number of dimensions of {self.source.node.name!r} is not known")
        return self.tracer.emit(torch.ops.aten.sym_size.int, (self.source, index), {})

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked_to(sys._getframe(1))
        if count is None:
            raise TraceError(f"the number of dimensions of {self.source.node.name!r} is not known")
        self.tracer.stand_ins.pin(self.source.node, Guess(ranks=(count,)))
        return iter([self[i] for i in range(count)])


def is_tensor(leaf: Any) -> bool:
    """True for a tensor in the model's code, real or traced."""
    return leaf.is_tensor if isinstance(leaf, Value) else isinstance(leaf, torch.Tensor)


def _unpacked_to(frame: types.FrameType) -> int | None:
    """Return the number of names that the current statement of ``frame`` unpacks a value to; None if it does not."""
    instruction = next(i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti)
    return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None


def _in_place(name: str) -> Callable[[Value, Any], Any]:
    function = getattr(operator, name)

    def write(self: Value, other: Any) -> Any:
        if self.is_tensor:  # torch.fx would record a new value, and leave the old one as it was
            return self.tracer.call(of_function(function) + "_", (self, other), {})
        return function(self, other)

    return write


for _name in _IN_PLACE:
    setattr(Value, f"__i{_name.rstrip('_')}__", _in_place(_name))
