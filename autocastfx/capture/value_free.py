"""Replace torch's own Python code that reads tensor values by code that gives the same result without."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from autocastfx.capture.patch import patched_here

__all__ = ["CumulativeNorms", "masks_taken_as_given"]


@contextmanager
def masks_taken_as_given() -> Generator[None, None, None]:
    """While open, ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` do not compare a mask with the causal one.

    The comparison only selects a faster kernel that needs no mask; with the mask the result is the same.
    """
    with patched_here(transformer, "_detect_is_causal_mask", _is_said_causal):
        yield


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


class CumulativeNorms(TorchFunctionMode):
    """Rewrites batch norms whose momentum is read from a tensor, because torch's operator takes a plain number.

    This is the case with ``momentum=None``, where the momentum is one over the number of batches.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and not torch.compiler.is_dynamo_compiling():
            return _batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


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
