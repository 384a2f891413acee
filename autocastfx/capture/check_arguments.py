"""Checks of the arguments of a conversion, before anything is captured."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from torch import nn

from autocastfx.dtypes import dtype_name
from autocastfx.errors import UnsupportedError, shown
from autocastfx.policy.kernel_facts import LEVELS

__all__ = ["check_arguments", "conversion_is_off", "refuse_for_low_model"]


def check_arguments(fold: str, weights: str = "cast", headroom: float = 1.0, *, check: bool | None = None) -> None:
    """Check arguments of a conversion.

    Raises:
        ValueError: one has no such value.
    """
    if not 1 <= headroom <= sys.float_info.max:
        raise ValueError(f"headroom is a finite factor of at least 1, not {shown(headroom)}")
    if check not in (None, True, False):
        raise ValueError(f"check is None, True or False, not {shown(check)}")
    choices = {"weights": (weights, ("cast", "cached", "low")), "fold": (fold, tuple(LEVELS))}
    for name, (given, known) in choices.items():
        if given not in known:
            raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {given!r}")


# Of a model that is 16-bit already.
_REFUSED = {
    "dtype": "the conversion has the dtype of the model: leave dtype out, or convert the float32 model",
    "weights": 'its parameters are stored in 16 bits as they are: leave weights="cast"',
    "fold": 'what the list denies is raised to float32: leave fold="exact", and name in op_list what is to be raised',
    "calibrate": "nothing is rounded that was not: name in op_list what is to be float32, or convert the float32 model",
    "sensitivity": "nothing is rounded that was not: convert the float32 model, for which it was measured",
    "recompose": "its ops stay those that they are, to the bit: leave recompose out, or convert the float32 model",
}


def refuse_for_low_model(module: nn.Module, own: torch.dtype, **given: Any) -> None:
    """Refuse arguments of a conversion that mean nothing for a model whose parameters are ``own``, a 16-bit dtype.

    Raises:
        UnsupportedError: one of them is given.
    """
    wanted = {"dtype": own, "weights": "cast", "calibrate": None, "sensitivity": None}
    for name, value in given.items():
        if name == "fold":
            is_fit = value != "kernel"
        else:
            is_fit = isinstance(value, bool) if name == "recompose" else value == wanted.get(name, value)
        if not is_fit:
            raise UnsupportedError(
                f"{name} was given, and the parameters of this {type(module).__name__} are {dtype_name(own)} already: "
                f"{_REFUSED[name]}."
            )


def conversion_is_off() -> bool:
    """True, and told, if the environment has ``AUTOCASTFX_DISABLE=1``: everything runs in float32, to compare runs.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    said = os.environ.get("AUTOCASTFX_DISABLE", "") or "0"
    if said not in ("0", "1"):
        raise ValueError(f"AUTOCASTFX_DISABLE is 0 or 1, not {said!r}")
    if said == "1":
        warnings.warn("AUTOCASTFX_DISABLE=1 is set: nothing is converted, and all runs in float32.", stacklevel=3)
    return said == "1"
