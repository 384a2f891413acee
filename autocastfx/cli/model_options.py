"""Load and convert the model that a command's arguments name."""

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
    """Load the model that ``spec`` names, with the weights of ``--weights``, in the mode of ``--mode``.

    Raises:
        ModelSpecError: there is no such model, it is a file and ``--trust`` is not given, or the weights do not fit.
        CaptureError: the model's own code raises.
    """
    model = load_pickled(spec, trust=options.trust) if is_model_file(spec) else load_model(spec)
    if options.weights is not None:
        load_weights(model, spec, options.weights)
    return model if options.mode is None else model.train(options.mode == "train")


def converted(
    options: Namespace, op_list: OpListLike, model: nn.Module | None = None, device: str | None = None
) -> AmpModule:
    """Convert ``model`` (by default ``options.model``) as the arguments say; a draft if they name no inputs.

    ``device`` is the device type to decide for, by default the model's.

    Raises:
        AutocastFXError: the model or the inputs cannot be loaded, or the model cannot be converted.
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
    """Return the device of a model's parameters and buffers; the CPU if it has none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
