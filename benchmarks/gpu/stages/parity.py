"""Compare the loss and the gradients of each side with float64, beside torch.autocast's own distance."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.measure import failure, release, settle
from benchmarks.gpu.sides import DTYPES, Source, source
from benchmarks.gpu.stage import Given, Row
from benchmarks.judge import distance, gradient_distances
from benchmarks.training import AUTOCAST, FLOAT32, side_of

SCALE = 1024.0  # of the loss, so that small gradients do not vanish in float16; the same on all sides


@dataclass(frozen=True)
class _Result:
    loss: Tensor
    gradients: Mapping[str, Tensor]


def parity(given: Given, model: str, sides: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each side and dtype, for a model without dropout.

    Args:
        given: what every stage is given.
        model: a key of ``MODELS``.
        sides: float32, torch.autocast, and converted ones.
    """
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found = source(model, given.device, dropout=False)
    settle()
    given.wait()
    exact = _result(copy.deepcopy(found.model).double(), _widened(found.inputs), contextlib.nullcontext())
    release()
    plain = _result(found.model, found.inputs, contextlib.nullcontext())
    for name, dtype in DTYPES.items():
        autocast: _Result | None = None
        for side in (AUTOCAST, *(one for one in sides if one != AUTOCAST)):
            try:
                result = plain if side == FLOAT32 else _of(side, found, dtype, given.device)
                autocast = result if side == AUTOCAST else autocast
                row = _row(result, exact, autocast)
            except Exception as error:  # of this side; the others are measured
                row = {"error": failure(error)}
            release()
            if not given.has(model, side, name):
                yield {"model": model, "side": side, "dtype": name, **row}


def _of(side: str, found: Source, dtype: torch.dtype, device: str) -> _Result:
    options = side_of(side).convert
    state = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    model: nn.Module = found.model
    if options is not None:
        model = found.converted(dtype, **options)
    region: Any = torch.autocast(device, dtype) if side_of(side).is_autocast else contextlib.nullcontext()
    try:
        return _result(model, found.inputs, region)
    finally:
        found.model.load_state_dict(state)  # statistics of batch norms are as they were


def _result(model: nn.Module, inputs: Mapping[str, Tensor], region: Any) -> _Result:
    """Return the loss, and the gradients by the parameters' names."""
    with region:
        loss = model(**inputs)[0]
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss.double() * SCALE, list(named.values()), allow_unused=True)
    used = {name: g / SCALE for name, g in zip(named, gradients, strict=True) if g is not None}
    return _Result(loss.detach(), used)


def _widened(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def _row(result: _Result, exact: _Result, autocast: _Result | None) -> Row:
    """Return the relative errors of the loss, of all gradients as one vector, and of the worst gradient."""
    row: Row = {"loss": float(result.loss), "loss_error": distance(result.loss, exact.loss)}
    row["gradients_error"] = distance(_vector(result, exact), _vector(exact, exact))
    errors = gradient_distances(result.gradients, exact.gradients)
    row["worst"], row["worst_error"] = max(errors.items(), key=lambda item: item[1])
    if autocast is not None:
        theirs = gradient_distances(autocast.gradients, exact.gradients)
        name = max(errors, key=lambda one: errors[one] / max(theirs[one], 1e-12))
        row["gradients_to_autocast"] = row["gradients_error"] / max(
            distance(_vector(autocast, exact), _vector(exact, exact)), 1e-12
        )
        row["farthest"], row["farthest_errors"] = name, [errors[name], theirs[name]]
    return row


def _vector(result: _Result, names: _Result) -> Tensor:
    return torch.cat([result.gradients[name].double().flatten() for name in names.gradients])
