"""Rules for casts in the model's code whose meaning a traced graph would lose."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import Any, cast

import torch

from autocastfx.capture.call_rules import Rule
from autocastfx.capture.failure import calling_frame

__all__ = ["Casts", "follows_dtype"]

_DTYPE = cast("Any", torch.Tensor.dtype).__get__
_CASTS = frozenset({torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as})
_FACTORIES = frozenset({torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace})


class Casts:
    """Rules that keep casts which change nothing in the float32 model.

    ``x.float()`` of a float32 ``x`` returns ``x``, so the tracer would make later readers of ``x`` read the cast.
    Applied to an alias of ``x``, the cast stays in its place. ``x.to(y.dtype)`` and ``x.type_as(y)`` ask for the dtype
    of ``y``, not for float32, which a graph would bake in. They become ``type_as`` nodes, or aliases if ``y`` is
    unknown; so do tensors made with ``dtype=y.dtype``. ``tidy`` removes these nodes, unless dtypes are to be followed.
    """

    def __init__(self) -> None:
        self.asked: torch.Tensor | None = None  # the tensor whose dtype was read last

    def rules(self) -> Mapping[Any, Rule]:
        """Return a rule for each function that casts or makes tensors, and for reading a dtype."""
        return {
            _DTYPE: self._dtype,
            **{func: partial(self._cast, func) for func in _CASTS},
            **{func: partial(self._made, func) for func in _FACTORIES},
        }

    def _dtype(self, x: torch.Tensor) -> torch.dtype:
        self.asked = x
        return x.dtype

    def _cast(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        alias = torch.ops.aten.alias.default(args[0])
        if _changes_nothing(func, args, kwargs) and _follows(func, args, kwargs):
            other = self._followed(args, kwargs)
            return alias if other is None else torch.ops.aten.type_as.default(alias, other)
        return func(alias, *args[1:], **kwargs)

    def _made(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor of the dtype that was read last, as in ``zeros(n, dtype=x.dtype)``, becomes a ``type_as``."""
        made = func(*args, **kwargs)
        if self.asked is None or kwargs.get("dtype") != self.asked.dtype or not _follows(func, args, {}):
            return made
        return torch.ops.aten.type_as.default(torch.ops.aten.alias.default(made), self.asked)

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
    return follows_dtype(calling_frame())


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
