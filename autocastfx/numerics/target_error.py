"""Measure the relative error of a converted model's gradient, or output, on batches: what a sensitivity predicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import arguments_of
from autocastfx.capture.leave_intact import intact, random_numbers_kept
from autocastfx.errors import SensitivityError
from autocastfx.numerics.loss import Inputs, LossFunction, loss_of
from autocastfx.numerics.node_effects import gradient_scale

__all__ = ["TargetError"]


@dataclass
class TargetError:
    """The target of a float32 model on batches, and the distance of other models from it.

    Buffers, gradients, attributes of the float32 model and the state of torch's random numbers are unchanged
    afterwards; each batch runs with the same random numbers in every model.

    Attributes:
        model: the float32 model.
        batches: kept, as are their targets: as many numbers as the model has parameters, for each.
        loss_fn, of, inputs: as for :func:`sensitivity`.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss_fn: LossFunction | None
    of: str
    inputs: Inputs | None
    _expected: list[tuple[list[torch.Tensor], float, float]] = field(init=False)

    def __post_init__(self) -> None:
        """Run the float32 model.

        Raises:
            SensitivityError: a target is zero or not finite.
        """
        self._expected = []
        for i, batch in enumerate(self.batches):
            found = self._target(self.model, batch, i, 1.0)
            norm = _norm(found)
            if not 0 < norm < math.inf:
                raise SensitivityError(f"the {self.of} of batch {i} is zero or not finite in float32: leave it out.")
            self._expected.append((found, norm, max((float(t.abs().max()) for t in found if t.numel()), default=0.0)))

    def __call__(self, amp_model: nn.Module, low: torch.dtype) -> float:
        """Measure the root mean square over the batches; infinite if a value overflows.

        Args:
            amp_model: converted from the float32 model, with its parameters.
            low: the 16-bit dtype, for the loss scale of gradients.
        """
        squares: list[float] = []
        for i, (batch, (expected, norm, largest)) in enumerate(zip(self.batches, self._expected, strict=True)):
            scale = gradient_scale(largest, low) / 16 if self.of == "gradient" else 1.0
            found = self._target(amp_model, batch, i, max(1.0, scale))
            distance = _norm(x - y for x, y in zip(found, expected, strict=True)) / norm
            squares.append(distance * distance if math.isfinite(distance) else math.inf)
        return math.sqrt(sum(squares) / len(squares))

    def _target(self, model: nn.Module, batch: Any, seed: int, scale: float) -> list[torch.Tensor]:
        args, kwargs = arguments_of(batch if self.inputs is None else self.inputs(batch))
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            with ExitStack() as modes:
                modes.enter_context(random_numbers_kept())
                if model is self.model:  # whose own forward runs, and may set attributes
                    modes.enter_context(intact(model, [module.training for module in model.modules()], {}))
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.set_grad_enabled(self.of == "gradient"))
                torch.manual_seed(seed)
                output = model(*args, **kwargs)
                if self.of == "output":
                    made = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
                    return [t.detach().float() for t in made if t.is_floating_point()]
                loss = loss_of(output, batch, self.loss_fn) * scale
                wanted = [p for p in self.model.parameters() if p.requires_grad]
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        given = cast("Sequence[torch.Tensor | None]", found)
        return [torch.zeros_like(p) if g is None else g / scale for g, p in zip(given, wanted, strict=True)]


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
