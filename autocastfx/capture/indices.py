"""Refuse at capture what a table cannot be asked for: torch 2.11 looks any dtype up in an abstract one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autocastfx.capture.call_rules import Rule

__all__ = ["INTEGER_INDICES"]


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if input.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"embedding: 'indices' are int64 or int32, not {input.dtype}")
    return F.embedding(input, weight, *args, **kwargs)


INTEGER_INDICES: Mapping[Any, Rule] = {F.embedding: _embedding}
