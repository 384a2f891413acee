"""Turn Dynamo's errors of a call into ours, which say in a few lines what failed and where, or into skipped code."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from traceback import StackSummary
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.call import CallSignature, sized
from autocastfx.capture.failure import place
from autocastfx.errors import AutocastFXError, CaptureError, UnsupportedError
from autocastfx.integrations.graph_break import is_torchs
from autocastfx.integrations.skipped_code import CALLER

__all__ = ["capture_mended", "plain_error"]

_CAUSE = re.compile(r"got \w+\((['\"])(?P<said>.*)\1\)")


@contextmanager
def capture_mended() -> Generator[None]:
    """Let Dynamo skip the code that it fails at by itself, and break the graph where it would lose a backward.

    An example of the first is a class whose ``__len__`` raises, from which it makes a guard; its ``suppress_errors``
    would hide our errors, and those of the model, too. The second is an autograd function inside a transform of
    ``torch.func``: no tensor of the transform requires a gradient, so Dynamo traces through the forward alone.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    frames: Any = convert_frame
    variable: Any = AutogradFunctionVariable
    before = frames.InternalTorchDynamoError, variable.call_apply
    frames.InternalTorchDynamoError, variable.call_apply = _mends()
    try:
        yield
    finally:
        frames.InternalTorchDynamoError, variable.call_apply = before


@cache
def _mends() -> tuple[Any, Any]:
    from torch._dynamo.exc import InternalTorchDynamoError, Unsupported
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    call: Any = AutogradFunctionVariable.call_apply

    class Skipped(Unsupported, InternalTorchDynamoError):
        """An error inside Dynamo that makes it skip the code."""

    def call_apply(self: Any, *args: Any) -> Any:
        if cast("Any", torch._C)._functorch.peek_interpreter_stack() is not None:
            raise Unsupported("an autograd function inside a transform of torch.func, whose backward would be lost")
        return call(self, *args)

    return Skipped, call_apply


def plain_error(error: Exception, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Return the error to raise in the place of one of Dynamo's; None if that should stay.

    Args:
        error: raised by a call of ``model`` that Dynamo captured.
        model: the model.
        args: the arguments of the call by position.
        kwargs: its keyword arguments.
    """
    from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError

    if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, AutocastFXError):
        return error.inner_exception
    if not isinstance(error, TorchRuntimeError):
        return None
    found = _CAUSE.search(str(error))
    what = found["said"] if found is not None else str(error).partition("\n")[0]
    what = what.partition(r"\nException raised from")[0]  # of C++, with its stack
    at = [
        f"at {where}" if (where := _innermost(getattr(error, "real_stack", None))) else "",
        _called(model, args, kwargs),
    ]
    said = ", ".join(filter(None, at))
    return CaptureError(
        f"{type(model).__name__} fails: {what}\n{said[:1].upper()}{said[1:]}\nCall the model itself with these inputs, "
        "after autocastfx.disable(model): if that fails too, mend that. If not, please report it."
    )


def _innermost(stack: StackSummary | None) -> str:
    """Return the innermost line that is not torch's."""
    own = [one for one in stack or () if one.filename != CALLER and not is_torchs(one.filename)]
    return place(own[-1].filename, own[-1].lineno or 0) if own else ""


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    try:
        return f"called with {CallSignature.of(model.forward).bind(args, kwargs)}"
    except (TypeError, UnsupportedError):  # arguments that have no words, as a cache
        sizes = [sized(one) for one in args if isinstance(one, torch.Tensor)]
        return f"called with {', '.join(sizes)}, among others" if sizes else ""
