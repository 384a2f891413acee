"""The cast of a value whose dtype is not known before the graph runs."""

from __future__ import annotations

import torch

__all__ = ["cast_if"]


def cast_if(value: torch.Tensor, source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """``value`` in ``target`` if it is in ``source``, else ``value`` itself."""
    return value.to(target) if value.dtype == source else value
