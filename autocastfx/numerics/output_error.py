"""Metrics for ``bisect``: the distance of a converted model's output from the float32 model's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import random_numbers_kept
from autocastfx.errors import BisectError
from autocastfx.report.comparison import Deviation

__all__ = ["METRICS", "OutputError"]


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return Deviation.of([ours], [theirs]).severity


def _absolute(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0


METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], float]] = {"error": _relative, "difference": _absolute}


class OutputError:
    """A metric: the largest distance of a floating-point output tensor from the float32 model's, for one call.

    Buffers, inputs and the state of torch's random numbers are unchanged after each evaluation.
    """

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str = "error", seed: int = 0
    ) -> None:
        """Run the float32 ``model``.

        Args:
            model: the float32 model, in the mode to measure.
            args: positional inputs of the call.
            kwargs: keyword inputs of the call.
            kind: ``"error"``, the distance in the 2-norm relative to the norm of the float32 tensor, infinite if values
                overflow; or ``"difference"``, the largest difference of an element.
            seed: seed of the random numbers of each call.

        Raises:
            BisectError: the output holds no floating-point tensor.
        """
        self._args, self._kwargs, self._seed, self._distance = args, kwargs, seed, METRICS[kind]
        self._expected = self._run(model)
        if not self._expected:
            raise BisectError("the model's output holds no floating-point tensor: give a metric of your own.")

    def __call__(self, amp_model: nn.Module) -> float:
        """Measure the distance of a converted model's output."""
        found = zip(self._run(amp_model), self._expected, strict=True)
        distances = [self._distance(ours, theirs) for ours, theirs in found]
        return max(distances, key=lambda distance: (distance != distance, distance))  # NaN is worst

    def _run(self, model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad(), _left_as_it_is(model, self._seed):
            args, kwargs = pytree.tree_map(_apart, (tuple(self._args), dict(self._kwargs)))
            output = model(*args, **kwargs)
        leaves = pytree.tree_leaves(output)
        return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _apart(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _left_as_it_is(model: nn.Module, seed: int) -> Generator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with random_numbers_kept():
            torch.manual_seed(seed)
            yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
