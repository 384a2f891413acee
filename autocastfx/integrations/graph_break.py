"""Find the code of torch that runs in Python behind a break of Dynamo's graph, uncaptured.

Where a graph breaks in a user's function, Dynamo captures what follows. Where it breaks inside a function of torch, the
call of that function runs in Python as a whole, with all that it calls: only what is compiled by itself is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from inspect import CO_GENERATOR
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

from autocastfx.integrations.skipped_code import CALLER, SkippedCode, modules_of, plain_name

__all__ = ["breaks", "is_torchs", "left_by_torch", "left_since"]

_RECURRENT = "RNN, GRU, or LSTM"  # what Dynamo names where it does not capture one
_DISABLED = "torch.compiler.disable()"  # what it names where it meets a function that a user has excluded
_TORCH = str(Path(torch.__file__).parent)
_SWITCH = str(Path(_TORCH, "_dynamo", "eval_frame.py"))  # whose wrappers switch Dynamo off
_MODULE = cast("Any", nn.Module)._call_impl.__code__.co_filename


def breaks() -> int:
    """Return how often a graph has broken in this process."""
    from torch._dynamo.utils import graph_break_reasons

    return len(graph_break_reasons)


def left_since(count: int, model: nn.Module) -> Iterator[SkippedCode]:
    """Yield what the breaks in a call of ``model`` since :func:`breaks` was ``count`` leave to Python, uncaptured.

    A module of torch is captured by itself then, through its :func:`caller`. If the graph breaks in it again, the
    modules in it are, and what it computes besides is left. A function in which the graph broke is left if Dynamo has
    not looked at it by itself either: it is a generator, or activation checkpointing calls it.
    """
    from torch._dynamo.utils import graph_break_reasons

    for one in graph_break_reasons[count:]:
        stack = [frame for frame in one.user_stack if not _calls_modules(frame.filename)]
        reason = one.reason.partition("\n")[0]
        inner = next((i for i, frame in enumerate(stack) if is_torchs(frame.filename)), None)
        if _DISABLED in reason:
            # What runs under torch.autocast is excluded, too, and was told of. A model that is, itself, has no stack.
            if stack and one.user_stack[-1].filename != CALLER:
                yield replace(_code(stack[-1], "it calls a function under torch.compiler.disable"), is_excluded=True)
            continue
        if inner is None:
            if _RECURRENT in reason:
                yield _code(stack[-1], reason)
            elif len(stack) > 1 and not _is_looked_at(stack[1]):
                yield _code(stack[0], f"the graph breaks in {plain_name(stack[1].name)}, which it calls: {reason}")
            continue
        left = _code(stack[inner], reason)
        holders = modules_of(model, left)
        is_new = any(module.__dict__.get("_compiled_call_impl") is None for module in holders)
        if holders and all(type(module).forward is nn.Sequential.forward for module in holders) and not is_new:
            continue  # it calls its modules, and does nothing besides
        if inner == 0 or is_new:
            inside = (part for holder in holders for part in holder.modules())
            yield replace(left, is_in_parts=not any(isinstance(part, nn.RNNBase) for part in inside))
        elif not holders:
            yield _code(stack[inner - 1], f"in {left.name}: {reason}")


def _is_looked_at(frame: FrameSummary) -> bool:
    """True if Dynamo has tried to capture a function by itself, not as part of what calls it."""
    from torch._dynamo.convert_frame import input_codes

    place, line = (frame.filename, frame.name), frame.lineno or 0
    codes = (code for one in input_codes.seen if (code := one()) is not None and not code.co_flags & CO_GENERATOR)
    return any((code.co_filename, code.co_name) == place and _has_line(code, line) for code in codes)


def _has_line(code: CodeType, line: int) -> bool:
    return any(line == one for _, _, one in code.co_lines())


def left_by_torch() -> SkippedCode | None:
    """Return the code that has called a function of torch's that is running, and in which Dynamo captures nothing.

    Activation checkpointing is one, where the graph breaks in what it calls: records name that place alone. The call of
    a module that a user has excluded is another. None if the function in which Dynamo is switched off is not torch's.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = None
    while frame is not None and frame.f_code.co_filename != _SWITCH:
        frame, inner = frame.f_back, frame
    if inner is None or not inner.f_code.co_filename.startswith(_TORCH):
        return None
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None:
        return None
    is_excluded = _calls_modules(inner.f_code.co_filename)
    reason = f"the graph breaks in what {inner.f_code.co_name} calls"
    if is_excluded:
        reason = "it calls a module under torch.compiler.disable"
    name, file = plain_name(frame.f_code.co_name), frame.f_code.co_filename
    return SkippedCode(name, file, frame.f_lineno, reason, is_excluded=is_excluded)


def _code(frame: FrameSummary, reason: str) -> SkippedCode:
    return SkippedCode(frame.name, frame.filename, frame.lineno or 0, reason)


def is_torchs(file: str) -> bool:
    """True for files whose functions Dynamo captures only as part of what calls them."""
    from torch._dynamo.trace_rules import check_file

    return bool(check_file(file).skipped)


def _calls_modules(file: str) -> bool:
    """True for the code between a module's call and its forward."""
    return file in (_MODULE, CALLER)
