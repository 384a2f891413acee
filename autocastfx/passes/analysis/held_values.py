"""Facts about the numbers that parameters, buffers and constants hold when a model is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autocastfx.graph.magnitude import Magnitude, is_here, magnitude
from autocastfx.passes.analysis.whole_numbers import holds_one_number, largest_whole

__all__ = ["HeldValues", "cast_once"]


@dataclass(frozen=True)
class HeldValues:
    """Tensors by ``get_attr`` target, as far as they have values here.

    Attributes:
        magnitudes: how large the elements of each float32 tensor are.
        single: tensors of one element that no optimizer changes.
        whole: largest magnitude of each buffer and constant that holds whole numbers alone.
        masks: buffers and constants of one number, or of 0 and one number.
        trained: parameters that require gradients.
        balanced: tensors that are not trained, and whose rows each add up to zero.
        averaging: tensors that are not trained, and whose rows each add up to one.
    """

    magnitudes: Mapping[str, Magnitude]
    single: frozenset[str]
    whole: Mapping[str, float]
    masks: frozenset[str]
    trained: frozenset[str]
    balanced: frozenset[str]
    averaging: frozenset[str]

    @classmethod
    def of(cls, held: Mapping[str, Any]) -> HeldValues:
        """The facts of all tensors among ``held``, which may also hold graphs of sub-graphs."""
        tensors = {n: t for n, t in held.items() if isinstance(t, torch.Tensor)}
        reached = {n: magnitude(t) for n, t in tensors.items()}
        fixed = {n: t for n, t in tensors.items() if not isinstance(t, nn.Parameter) and is_here(t)}
        whole = {n: largest_whole(t) for n, t in fixed.items()}
        trained = {n for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        weights = {n: t for n, t in tensors.items() if n not in trained and is_here(t)}
        return cls(
            magnitudes={n: found.magnitude() for n, found in reached.items() if found is not None},
            single=frozenset(n for n, t in tensors.items() if t.numel() == 1 and n not in trained),
            whole={n: found for n, found in whole.items() if found is not None},
            masks=frozenset(n for n, t in fixed.items() if holds_one_number(t)),
            trained=frozenset(trained),
            balanced=frozenset(n for n, t in weights.items() if _rows_add_up_to(0.0, t)),
            averaging=frozenset(n for n, t in weights.items() if _rows_add_up_to(1.0, t)),
        )

    @cached_property
    def largest(self) -> dict[str, float]:
        """Largest finite magnitude of each float32 tensor."""
        return {name: found.largest for name, found in self.magnitudes.items()}


def _rows_add_up_to(total: float, tensor: torch.Tensor) -> bool:
    """True for the weights of a stencil (zero), or of an average (one)."""
    if tensor.ndim < 2 or tensor.numel() <= tensor.shape[0] or tensor.dtype != torch.float32:
        return False
    rows = tensor.detach().flatten(1).double()
    sizes = rows.abs().sum(1)
    return bool((((rows.sum(1) - total).abs() <= 1e-6 * sizes) & (sizes > 0)).all())


def cast_once(held: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The tensors that torch.autocast casts to 16 bits once a region: float32 leaves that require gradients."""
    own = {n: t for n, t in held.items() if t.dtype == torch.float32 and t.requires_grad and t.is_leaf}
    return {name: id(tensor) for name, tensor in own.items()}
