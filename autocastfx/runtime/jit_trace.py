"""Choose a graph while ``torch.jit.trace`` records a call of a converted model."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.jit._trace import TracerWarning

from autocastfx.capture.shape_guard import ShapeGuard

__all__ = ["untraced", "warn_of_sizes"]

_C: Any = torch._C


@contextmanager
def untraced() -> Generator[None]:
    """While open, ``torch.jit.trace`` records nothing, and sizes are numbers."""
    state = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        yield
    finally:
        _C._set_tracing_state(state)


def warn_of_sizes(guard: ShapeGuard) -> None:
    """Say for which sizes a trace of one graph holds: no trace captures a further graph."""
    if guard.conditions:
        warnings.warn(
            f"the trace runs the graph for sizes where {guard}, and does not check that.",
            TracerWarning,
            stacklevel=2,
        )
