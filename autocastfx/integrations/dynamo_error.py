"""Turn Dynamo's errors of a call into ours, which say in a few lines what failed and where, or into skipped code."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autocastfx.capture.call import CallSignature, sized
from autocastfx.capture.failure import place
from autocastfx.errors import AutocastFXError, CaptureError, UnsupportedError
from autocastfx.integrations.graph_break import is_torchs
from autocastfx.integrations.skipped_code import CALLER

__all__ = ["internal_errors_skip", "plain_error"]

_CAUSE = re.compile(r"got \w+\((['\"])(?P<said>.*)\1\)")


@contextmanager
def internal_errors_skip() -> Generator[None]:
    """Let Dynamo skip the code that it fails at by itself, as it skips what it knows that it cannot capture.

    An example is a class whose ``__len__`` raises, from which it makes a guard. Its ``suppress_errors`` would hide our
    errors, and those of the model, too.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.exc import InternalTorchDynamoError, Unsupported

    class Skipped(Unsupported, InternalTorchDynamoError):
        """An error inside Dynamo that makes it skip the code."""

    with patch.object(convert_frame, "InternalTorchDynamoError", Skipped):
        yield


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
