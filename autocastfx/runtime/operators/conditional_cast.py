"""Cast a value whose dtype is known only when the graph runs."""

from __future__ import annotations

import torch

__all__ = ["cast_if"]


def cast_if(value: torch.Tensor, source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Cast ``value`` to ``target`` if its dtype is ``source``; else return it unchanged."""
    return value.to(target) if value.dtype == source else value
