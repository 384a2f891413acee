"""The 16-bit dtypes that a conversion can use, and the names of dtypes as lists, plans and messages write them."""

from __future__ import annotations

import torch

__all__ = ["LOW_DTYPES", "dtype_name"]

LOW_DTYPES = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")
