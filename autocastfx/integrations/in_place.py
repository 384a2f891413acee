"""``enable`` and ``disable``: convert a model that stays the object it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autocastfx.capture.call import arguments_of, device_of, refuse_for_low_model
from autocastfx.dtypes import chosen_dtype, one_low_dtype
from autocastfx.errors import UnsupportedError
from autocastfx.integrations.checked_copies import check_capture
from autocastfx.integrations.compile_backend import CompileBackend
from autocastfx.integrations.compiled_call import CompiledCall
from autocastfx.policy.op_list import load_op_list
from autocastfx.report.conversion_warnings import warn_of_other_parameters
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["backend_of", "disable", "enable"]


def enable(
    model: nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    inner: Any = "eager",
    check: Any = None,
    **arguments: Any,
) -> nn.Module:
    """Convert ``model`` in place: its calls run partly in 16 bits from now on, and all else of it stays.

    Class, modules, hooks, parameters, ``state_dict`` and methods such as ``generate`` and ``save_pretrained`` are the
    model's own. Dynamo captures it at its calls, and again when what its code reads has changed: a module, a hook, an
    adapter, an attribute, ``training``. A module in it that is called by itself is converted, too; so
    ``model.forward(...)`` converts the modules one by one. Copies of the model are not enabled.

    Args:
        model: the model, or a part of one.
        dtype: as in :func:`convert`; the model is where it should run. A 16-bit model is converted as there.
        inner: as in :class:`CompileBackend`, but by default ``"eager"``, which needs no compiler.
        check: the inputs of a call, as a batch of :func:`calibrate`. What is captured for it, without casts, must do
            what the model does, as in ``convert(check=True)``; that is tried on copies, before the model is enabled.
        arguments: of :class:`CompileBackend`, such as ``op_list``.

    Returns:
        The same model.

    Raises:
        CaptureError: ``check`` found a difference.
        UnsupportedError: the model is enabled already, compiled by ``torch.compile``, or what ``convert`` returned; or
            it is 16-bit, and was given another dtype, ``fold="kernel"``, or names to recompose.
        OpListError: a list is wrong.
        ValueError: an argument has no such choice.
    """
    name = type(model).__name__
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: enable the original.")
    if backend_of(model) is not None:
        raise UnsupportedError(
            f"this {name} is enabled already: call disable first, to enable it with other arguments."
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            f"this {name} is compiled already: enable it instead, with inner= the backend that it was compiled by."
        )
    warn_of_other_parameters(model, stacklevel=3)
    follows = load_op_list(arguments.get("op_list", "default")).placement == "follow"  # it casts 16-bit values, too
    own = None if follows else one_low_dtype(p.dtype for p in model.parameters())
    low = chosen_dtype(own if dtype is None else dtype, device_of(model))
    if own is not None:
        named = {name: arguments[name] for name in ("fold", "recompose") if name in arguments}
        refuse_for_low_model(model, own, dtype=low, **named)
    backend = CompileBackend(dtype=low, inner=inner, **arguments)
    if check is not None:
        check_capture(model, backend, arguments_of(check))
    return backend.compile(model)


def disable(model: nn.Module) -> nn.Module:
    """Undo :func:`enable`: the model's calls run its own code again. A model that is not enabled stays as it is.

    Returns:
        The same model.
    """
    if isinstance(call := model.__dict__.get("_compiled_call_impl"), CompiledCall):
        call.undo()
    return model


def backend_of(model: nn.Module) -> CompileBackend | None:
    """Return what converts an enabled model, with its graphs and their plans; None if the model is not enabled."""
    call = model.__dict__.get("_compiled_call_impl")
    backend = call.backend if isinstance(call, CompiledCall) else None
    return backend if isinstance(backend, CompileBackend) else None
