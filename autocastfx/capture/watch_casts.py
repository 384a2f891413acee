"""Watch the model's Python calls during capture: casts whose meaning the traced graph would lose, and the time."""

from __future__ import annotations

import linecache
import sys
import time
from types import FrameType
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Watch", "follows_dtype"]

_DTYPE = cast("Any", torch.Tensor.dtype).__get__
_CASTS = frozenset({torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as})
_FACTORIES = frozenset({torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace})


class TooSlowError(Exception):
    """The capture took longer than allowed."""


class Watch(TorchFunctionMode):
    """Ends a capture that takes too long, and records casts that change nothing in the float32 model.

    ``x.float()`` of a float32 ``x`` returns ``x``, so the tracer would make later readers of ``x`` read the cast.
    Applied to an alias of ``x``, the cast stays in its place. ``x.to(y.dtype)`` and ``x.type_as(y)`` ask for the dtype
    of ``y``, not for float32, which a graph would bake in. They become ``type_as`` nodes, or aliases if ``y`` is
    unknown; so do tensors made with ``dtype=y.dtype``. ``tidy`` removes these nodes, unless dtypes are to be followed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.end = time.thread_time() + seconds
        self.asked: torch.Tensor | None = None  # the tensor whose dtype was read last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it traces the bodies of cond and while_loop, and modes with them
            return func(*args, **kwargs)
        if time.thread_time() > self.end:
            raise TooSlowError("capturing every size as dynamic takes too long")
        if func == _DTYPE:
            self.asked = args[0]
        elif func in _CASTS and isinstance(args[0], torch.Tensor):
            alias = torch.ops.aten.alias.default(args[0])
            if _changes_nothing(func, args, kwargs) and _follows(func, args, kwargs):
                other = self._followed(args, kwargs)
                return alias if other is None else torch.ops.aten.type_as.default(alias, other)
            args = (alias, *args[1:])
        elif self._makes_alike(func, kwargs) and _follows(func, args, {}):
            made = torch.ops.aten.alias.default(func(*args, **kwargs))
            return torch.ops.aten.type_as.default(made, self.asked)
        return func(*args, **kwargs)

    def _makes_alike(self, func: Any, kwargs: dict[str, Any]) -> bool:
        """True if the call makes a tensor of the dtype that was read last: ``zeros(n, dtype=x.dtype)``."""
        return func in _FACTORIES and self.asked is not None and kwargs.get("dtype") == self.asked.dtype

    def _followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the tensor whose dtype the cast asks for, if known."""
        given = (*args[1:], *kwargs.values())
        named = next((arg for arg in given if isinstance(arg, torch.Tensor)), None)
        read = self.asked if self.asked is not None and self.asked.dtype in given else None
        return named if named is not None else read


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*args[1:], *kwargs.values())
    if len(given) != 1 or set(kwargs) - {"dtype", "other"}:
        return False
    (target,) = given
    if isinstance(target, torch.Tensor):
        return (target.dtype, target.device) == (args[0].dtype, args[0].device)
    if isinstance(target, (str, torch.device)) and func is torch.Tensor.to:
        return torch.device(target) == args[0].device
    return target == args[0].dtype


def _follows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the model's source asks for a device, or for the dtype of another value, and not for float32."""
    others = (torch.Tensor, torch.device, str)
    if func in (torch.Tensor.type_as, torch.Tensor.to) and any(
        isinstance(a, others) for a in (*args[1:], *kwargs.values())
    ):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # torch.export has a mode too
        frame = frame.f_back
    return frame is not None and follows_dtype(frame)


def follows_dtype(frame: FrameType) -> bool:
    """True if the source of the cast that ``frame`` is in asks for the dtype of another value."""
    source = _source(frame)
    return ".dtype" in source and "float" not in source


def _source(frame: FrameType) -> str:
    """Return the source of the call that ``frame`` is in; before Python 3.11, the whole line."""
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno)
    if sys.version_info < (3, 11):
        return line
    positions = list(code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return line
    lines = [linecache.getline(code.co_filename, number) for number in range(first, last + 1)]
    lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")
    lines[0] = lines[0].encode()[start:].decode(errors="ignore")
    text = "".join(lines)
    return text[text.rfind(".to(") :] if ".to(" in text else text  # the text before is the receiver of the call
