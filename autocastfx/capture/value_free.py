"""Replace torch's own Python code that reads tensor values by code that gives the same result without."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import transformer

from autocastfx.capture.call_rules import Rule
from autocastfx.capture.patch import patched_here

__all__ = ["CUMULATIVE_NORMS", "masks_taken_as_given"]


@contextmanager
def masks_taken_as_given() -> Generator[None, None, None]:
    """While open, ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` do not compare a mask with the causal one.

    The comparison only selects a faster kernel that needs no mask; with the mask the result is the same.
    """
    with patched_here(transformer, "_detect_is_causal_mask", _is_said_causal):
        yield


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    factor: Any = momentum
    if not isinstance(momentum, torch.SymFloat) or not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, factor, eps)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, var, weight, bias, training, 1.0, eps)  # the statistics of this batch
    with torch.no_grad():
        for average, of_batch in ((running_mean, mean), (running_var, var)):
            average.mul_(1 - factor).add_(of_batch * factor)
    return result


# Batch norms whose momentum is read from a tensor, because torch's operator takes a plain number: with
# ``momentum=None`` it is one over the number of batches.
CUMULATIVE_NORMS: Mapping[Any, Rule] = {F.batch_norm: _batch_norm}
