"""The 16-bit dtypes that a conversion can use, and the names of dtypes as lists, plans and messages write them."""

from __future__ import annotations

import torch

__all__ = ["LOW_DTYPES", "dtype_name", "low_dtype"]

LOW_DTYPES = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


_SAID = {"fp16": torch.float16, "half": torch.float16, "bf16": torch.bfloat16} | {
    dtype_name(dtype): dtype for dtype in LOW_DTYPES
}


def low_dtype(said: torch.dtype | str) -> torch.dtype:
    """Return the 16-bit dtype that a user named: ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``.

    Raises:
        ValueError: it is none.
    """
    found = _SAID.get(said.lower().removeprefix("torch.")) if isinstance(said, str) else said
    if found not in LOW_DTYPES:
        raise ValueError(f"dtype is torch.float16 or torch.bfloat16, not {said!r}")
    return found
