"""What the arguments of a command say of a model: the model itself, and the model converted."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import nn

from autocastfx.cli.model_file import is_model_file, load_pickled, load_weights
from autocastfx.cli.model_spec import load_inputs, load_model
from autocastfx.conversion import convert
from autocastfx.errors import NotCapturedError
from autocastfx.policy.op_list import OpList, OpListLike, load_op_list
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["converted", "device_of", "given_model"]


def given_model(options: Namespace, spec: str) -> nn.Module:
    """The model that ``spec`` names, with the weights of ``--weights``, in the mode of ``--mode``.

    Raises:
        ModelSpecError: there is none, it is a file and ``--trust`` is not given, or the weights do not fit.
        CaptureError: its own code raises.
    """
    model = load_pickled(spec, trust=options.trust) if is_model_file(spec) else load_model(spec)
    if options.weights is not None:
        load_weights(model, spec, options.weights)
    return model if options.mode is None else model.train(options.mode == "train")


def converted(
    options: Namespace, op_list: OpListLike, model: nn.Module | None = None, device: str | None = None
) -> AmpModule:
    """``options.model``, or ``model``, converted as the arguments say; a draft where they name no inputs.

    ``device`` is whose kernels are decided for; those of the model's own by default.

    Raises:
        AutocastFXError: the model or the inputs are not there, or cannot be converted.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    lists: OpList = load_op_list(op_list, default=options.dtype)
    model = given_model(options, options.model) if model is None else model
    if not options.inputs:
        draft = convert(model, dtype=dtype, op_list=lists, device=device)
        try:
            _ = draft.plan
        except NotCapturedError as error:
            raise NotCapturedError(f"{error} Here that is --inputs.") from error
        return draft
    args, kwargs = load_inputs(options.inputs, device_of(model))
    return convert(model, args, kwargs, dtype=dtype, op_list=lists, device=device)


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters and buffers are; the CPU if it has none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
