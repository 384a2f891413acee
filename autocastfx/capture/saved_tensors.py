"""Keep a caller's hooks on saved tensors away from what is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["no_saved_tensors_hooks"]


def no_saved_tensors_hooks() -> AbstractContextManager[None]:
    """Let autograd keep what tracing makes it save, whatever ``saved_tensors_hooks`` the caller is in.

    Activation checkpointing is such a caller, and counts what is saved; others copy each tensor, which a traced one
    does not allow. torch applies the innermost hooks alone.
    """
    return saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
