"""Load and convert the model that a command's arguments name."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import nn

from autocastfx.capture.call import device_of
from autocastfx.cli.conversion_options import conversion_arguments, given_options
from autocastfx.cli.model_file import is_model_file, load_pickled, load_weights
from autocastfx.cli.model_spec import load_inputs, load_model
from autocastfx.conversion import convert
from autocastfx.dtypes import chosen_dtype, dtype_name
from autocastfx.errors import ModelSpecError, NotCapturedError
from autocastfx.policy.op_list import OpList, OpListLike, load_op_list
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["converted", "given_model"]


def given_model(options: Namespace, spec: str) -> nn.Module:
    """Load the model that ``spec`` names, with the weights of ``--weights``, in the mode of ``--mode``.

    Raises:
        ModelSpecError: there is no such model, it is a file and ``--trust`` is not given, or the weights do not fit.
        CaptureError: the model's own code raises.
    """
    model = load_pickled(spec, trust=options.trust) if is_model_file(spec) else load_model(spec)
    if options.weights is not None and not isinstance(model, AmpModule):
        load_weights(model, spec, options.weights)
    return model if options.mode is None else model.train(options.mode == "train")


def converted(
    options: Namespace, op_list: OpListLike, model: nn.Module | None = None, device: str | None = None
) -> AmpModule:
    """Convert ``model`` (by default ``options.model``) as the arguments say; a draft without inputs and batches.

    A file of a converted model is taken as it is. ``device`` is the device type to decide for, by default that of
    ``--device`` or the model's.

    Raises:
        AutocastFXError: the model or the inputs cannot be loaded, or the model cannot be converted.
    """
    model = given_model(options, options.model) if model is None else model
    if isinstance(model, AmpModule):
        _check_converted(options, model, device)
        return model
    place = device_of(model)
    how = conversion_arguments(options, place)
    if device is not None:
        how["device"] = device
    dtype = chosen_dtype(options.dtype, torch.device(how.get("device") or place))
    lists: OpList = load_op_list(op_list, default=dtype_name(dtype))
    if not options.inputs:
        draft = convert(model, dtype=dtype, op_list=lists, **how)
        try:
            _ = draft.plan
        except NotCapturedError as error:
            raise NotCapturedError(f"{error} Here that is --inputs.") from error
        return draft
    args, kwargs = load_inputs(options.inputs, place)
    return convert(model, args, kwargs, dtype=dtype, op_list=lists, **how)


def _check_converted(options: Namespace, model: AmpModule, device: str | None) -> None:
    """Refuse options that would convert a model which is converted already.

    Raises:
        ModelSpecError: there are such.
    """
    if device is not None:
        raise ModelSpecError(
            "the file holds a converted model, which was decided for its own device: give the original."
        )
    low = model.plan.low
    names = [f"--{name.replace('_', '-')}" for name in ("inputs", "op_list", "weights") if getattr(options, name, None)]
    given = [
        *names,
        *given_options(options),
        *([f"--dtype {options.dtype}"] if options.dtype not in (None, low) else []),
    ]
    if given:
        raise ModelSpecError(
            f"the file holds a model that is converted already, to {low}: leave {', '.join(given)} out."
        )
