"""The 16-bit dtypes that a conversion can use, and the names of dtypes as lists, plans and messages write them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from autocastfx.errors import ArgumentError

_LOG = logging.getLogger("autocastfx")

LOW_DTYPES = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit tensor in float32, and any other one as it is."""
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor


def one_low_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the 16-bit dtype that all floating-point ones of ``dtypes`` are; None if they are not all one."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    return floating.pop() if len(floating) == 1 and floating <= set(LOW_DTYPES) else None


_SAID = {"fp16": torch.float16, "half": torch.float16, "bf16": torch.bfloat16} | {
    dtype_name(dtype): dtype for dtype in LOW_DTYPES
}


def is_dtype(value: object) -> bool:
    """True of a dtype, and of the name of one that a conversion can use."""
    return isinstance(value, torch.dtype) or (isinstance(value, str) and value.lower() in _SAID)


def low_dtype(said: torch.dtype | str) -> torch.dtype:
    """Return the 16-bit dtype that a user named: ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``.

    Raises:
        ValueError: it is none.
    """
    found = _SAID.get(said.lower().removeprefix("torch.")) if isinstance(said, str) else said
    if found not in LOW_DTYPES:
        raise ArgumentError(f"dtype is torch.float16 or torch.bfloat16, not {said!r}")
    return found


def chosen_dtype(said: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Return the 16-bit dtype that a user named; if none, bfloat16 on a CPU and float16 elsewhere.

    A CPU computes float16 slower than float32, and bfloat16 faster.

    Raises:
        ValueError: the name is of no 16-bit dtype.
    """
    if said is not None:
        return low_dtype(said)
    found = torch.bfloat16 if device.type == "cpu" else torch.float16
    _LOG.info("dtype: %s, the default on %s", dtype_name(found), device.type)
    return found
