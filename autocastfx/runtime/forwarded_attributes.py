"""Give a converted model the attributes of the original and the signature of its forward."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

from autocastfx.capture.call import CallSignature
from autocastfx.errors import UnsupportedError

__all__ = ["forwarded", "set_on_original", "signed_forward"]


def forwarded(model: nn.Module, amp_model: nn.Module, name: str, missing: AttributeError) -> Any:
    """Return the attribute ``name`` of ``model``; a method is bound to ``amp_model``.

    Raises:
        AttributeError: the original does not have it either; this is ``missing``.
        UnsupportedError: the method runs the model's forward (``generate``), or its source cannot be read.
    """
    try:
        found = getattr(model, name)
    except AttributeError:
        raise missing from None
    if not inspect.ismethod(found) or found.__self__ is not model:
        return found
    if _runs_forward(type(model), name, set()):
        raise UnsupportedError(
            f"{type(model).__name__}.{name} runs the model's own forward, which is not converted. Call it on the "
            "original, or write the loop around the converted model's call."
        )
    return found.__func__.__get__(amp_model)


def set_on_original(model: nn.Module | None, name: str, value: Any) -> None:
    """Set an attribute that graphs depend on, on the original, where variants check it.

    Raises:
        UnsupportedError: the original is not at hand.
    """
    if model is None:
        raise UnsupportedError(
            f"the graphs depend on the value of attribute {name!r}, and the original is not at hand to be captured "
            "again: set it on the original, and convert that."
        )
    setattr(model, name, value)


def signed_forward(signature: CallSignature) -> Callable[..., Any]:
    """Make a forward with the original's signature, for export, trainers and ``help``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    forward.__code__ = forward.__code__.replace()  # torch.compile caches by code object, so each forward has its own
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([first, *signature.parameters])
    return forward


def _runs_forward(kind: type, name: str, seen: set[str]) -> bool:
    """True if a method calls ``self(...)``, ``self.forward`` or another method that does, or has no readable source."""
    if name in ("forward", "__call__") or name in seen:
        return name not in seen
    seen.add(name)
    method = inspect.getattr_static(kind, name, None)
    if isinstance(method, (staticmethod, property)) or not callable(method):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return True
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return True
    own = function.args.args[0].arg
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == own:
            return True
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own):
            continue
        if inspect.getattr_static(kind, node.attr, None) is not None and _runs_forward(kind, node.attr, seen):
            return True
    return False
