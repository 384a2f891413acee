"""Turn torch's errors of a failed capture into one that says why it failed and what would help."""

from __future__ import annotations

import itertools
import linecache
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from unittest import mock

import torch
from torch import fx, nn

from autocastfx.errors import CaptureError
from autocastfx.graph.node import stack_trace

TORCH = str(Path(torch.__file__).parent)
_NOT_THE_MODEL = (TORCH, str(Path(__file__).parents[1]))

_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.variables.builtin",
    "torch._guards",
)
_REPEATED = (
    *("Unable to find user code", "failed while attempting to run meta", "Graph break from"),
    *("Error while creating guard", "Created at"),
)


class TooSlowError(Exception):
    """The capture took longer than allowed."""


class AgainError(Exception):
    """The attempt learned something that capture needs: make the same attempt again."""


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Silence torch.export's warnings about attributes set in forward, and its output when it fails.

    The attributes are restored. The output is thousands of lines of the unfinished graph, and the error says the cause.
    """
    from torch.export import _trace as export_trace

    with warnings.catch_warnings(), mock.patch.object(export_trace, "print", _no_print, create=True), quiet_logs():
        warnings.filterwarnings("ignore", message=r".*assigned during export.*")
        yield


@contextmanager
def quiet_logs() -> Generator[None, None, None]:
    """Silence what torch logs of a failed trace or a broken graph, each in tens of lines; we tell it in one message."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for log in loggers:
        log.addFilter(_is_of_use)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(_is_of_use)


def _no_print(*_: object, **__: object) -> None:
    pass


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_REPEATED)


def capture_error(model: nn.Module, failures: Sequence[Exception], *, training: bool, called: str = "") -> CaptureError:
    """Make the error for failed attempts, given in the order in which they were made.

    It has three lines: the cause, the place in the model's code and in its modules, and what would help. Its
    ``__context__`` is torch's own error, which tracebacks do not print.

    Args:
        model: the model.
        failures: an error for each attempt, at least one.
        training: the mode, for the message.
        called: the arguments of the call, for the message.
    """
    chosen = _most_helpful(failures)
    lines = str(chosen).strip().splitlines()
    what = f"{type(chosen).__name__}: {lines[0].strip()}" if lines else type(chosen).__name__
    mode = "train" if training else "eval"
    at = [f"at {where}" if (where := _innermost(chosen)) else "", _module_of(chosen, model)]
    at += [f"called with {called}" if called else ""]
    place = ", ".join(filter(None, at))
    said = [f"{type(model).__name__} cannot be captured in {mode} mode: {what}", place[:1].upper() + place[1:]]
    error = CaptureError("\n".join(filter(None, [*said, _advice(chosen)])))
    error.__context__, error.__suppress_context__ = chosen, True
    return error


def asks_for_values(error: Exception) -> bool:
    """True if the model branches on values, so that no choice of dynamic sizes helps."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)


def _most_helpful(failures: Sequence[Exception]) -> Exception:
    """Return the error of a branch on values, if any, because no choice of dynamic sizes helps against that.

    Else return the last attempt's error: with the fewest symbolic sizes, the cause is the model and not its sizes.
    """
    on_values = [error for error in failures if asks_for_values(error)]
    others = [error for error in failures if not isinstance(error, TooSlowError)]
    return (on_values or others[::-1] or list(failures))[0]


def calling_frame() -> FrameType:
    """Return the frame of the call that a ``__torch_function__`` up the stack is handling."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    handlers = itertools.dropwhile(lambda frame: frame.f_code.co_name != "__torch_function__", frames)
    return next(itertools.dropwhile(lambda frame: frame.f_code.co_name == "__torch_function__", handlers))


def frame_outside(*folders: str) -> FrameType:
    """Return the innermost frame whose code is in none of the folders: by default, neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders or _NOT_THE_MODEL):
        frame = frame.f_back
    return frame


def place(filename: str, number: int) -> str:
    """Write a line of code as file, number and text."""
    line = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {line}" if line else f"{filename}:{number}"


def line_of(node: fx.Node) -> str:
    """Write the innermost line of the model that made a node; empty if capture recorded none."""
    found = re.findall(r'File "(.+)", line (\d+)', stack_trace(node))
    return place(found[-1][0], int(found[-1][1])) if found else ""


def _innermost(error: Exception) -> str:
    """Return the innermost line of the model's own code in the traceback of ``error``."""
    frames = ((frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__))
    own = [place(name, number) for name, number in frames if not name.startswith((*_NOT_THE_MODEL, "<"))]
    return own[-1] if own else ""


def _module_of(error: Exception, model: nn.Module) -> str:
    """Name the innermost module of ``model`` whose call is in the traceback of ``error``."""
    paths = {id(module): name for name, module in model.named_modules()}
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [one for one in called if isinstance(one, nn.Module) and paths.get(id(one))]
    return f"in module {paths[id(inside[-1])]!r} ({type(inside[-1]).__name__})" if inside else ""


def _advice(error: Exception) -> str:
    text = str(error)
    if "data-dependent" in text or "GuardOnDataDependent" in text or "item()" in text or ".numpy()" in text:
        return (
            "Its control flow depends on tensor values, or Python code needs one of them as a number. Use torch.where, "
            "torch.cond or torch's own functions there, convert the submodules apart, or convert in place, with "
            "autocastfx.enable, which goes on behind such code."
        )
    if "pytree" in text or "unsupported type" in text.lower() or ("output" in text and "type" in text):
        return (
            "It returns an object that is not a tensor, number, dict, list or tuple. Return tensors (transformers: "
            "use_cache=False), register the class with torch.utils._pytree.register_pytree_node (a dataclass with "
            "torch.export.register_dataclass), or convert in place, with autocastfx.enable."
        )
    if type(error).__module__ == "builtins":
        return (
            "Call the model itself with these inputs: if that fails too, mend that first. If not, convert in place, "
            "with autocastfx.enable, which needs no single graph."
        )
    return (
        "Try torch.export.export(model, args, kwargs, strict=False) alone to see the full error, convert submodules "
        "apart, or convert in place, with autocastfx.enable, which needs no single graph."
    )
