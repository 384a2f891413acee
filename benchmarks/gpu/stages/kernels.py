"""Time our operators with their Triton kernels beside their parts and torch's own operators, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from autocastfx.runtime.operators import cross_entropy_loss as cross_entropy_module
from autocastfx.runtime.operators import norms as rms_norm_module
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from autocastfx.runtime.operators.norms import rms_norm
from benchmarks.gpu.measure import Work, interleaved, timed
from benchmarks.gpu.sides import DTYPES
from benchmarks.gpu.stage import ROUNDS, Given, Rounds, Row

TRITON, PARTS, TORCH, FUSED = "Triton", "parts", "torch", "torch, fused"
SIDES = (TRITON, PARTS, TORCH, FUSED)


def kernels(
    given: Given,
    vocabularies: Sequence[tuple[int, int]],
    norms: Sequence[tuple[int, int]],
    sides: Sequence[str] = SIDES,
    rounds: Rounds = ROUNDS,
) -> Iterator[Row]:
    """Yield the times of each side, with ratios to the parts.

    Args:
        given: what every stage is given.
        vocabularies: rows and classes of the scores of a cross entropy.
        norms: rows and widths of the inputs of a norm, whose weight is float32. They are float32 too, as the residual
            stream of a model is.
        sides: of ``SIDES``; the last one is of norms alone.
        rounds: how many.
    """
    for dtype, own in {**DTYPES, "float32": torch.float32}.items():
        losses = () if dtype == "float32" else vocabularies
        for what, shapes, make in (("cross entropy", losses, _losses), ("RMS norm", norms, _norms)):
            for shape in shapes:
                name, tried = f"{what} {shape[0]} x {shape[1]}", [s for s in sides if s != FUSED or make is _norms]
                if all(given.has(name, side, dtype) for side in tried):
                    continue
                made = make(shape, own, given.device)
                work = {side: _work(made[side], side == TRITON) for side in tried}
                for times in interleaved(work, rounds, given.device):
                    for side, row in timed(times, rounds, PARTS, "parts").items():
                        yield {"model": name, "side": side, "dtype": dtype, **row}


def _work(step: Callable[[], object], chosen: bool) -> Work:
    """Time ``step`` with Triton's kernels, or without them, whatever the device's facts say."""

    def is_chosen(name: str, tensor: Tensor) -> bool:
        return chosen

    modules = cross_entropy_module, rms_norm_module
    patches = [mock.patch.object(module, "is_chosen", is_chosen) for module in modules]
    return Work(
        {"step": step}, lambda: [patch.start() for patch in patches], lambda: [patch.stop() for patch in patches]
    )


def _losses(shape: tuple[int, int], dtype: torch.dtype, device: str) -> Mapping[str, Callable[[], object]]:
    scores = torch.randn(shape, device=device).to(dtype).requires_grad_()
    target = torch.arange(shape[0], device=device) % shape[1]
    ours = _trained(lambda: cross_entropy_loss(scores, target), scores)
    theirs = _trained(lambda: functional.cross_entropy(scores.float(), target), scores)
    return {TRITON: ours, PARTS: ours, TORCH: theirs}


def _norms(shape: tuple[int, int], dtype: torch.dtype, device: str) -> Mapping[str, Callable[[], object]]:
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight = torch.ones(shape[1:], device=device, requires_grad=True)
    gradient = torch.randn(shape, device=device).to(dtype)
    ours = _trained(lambda: rms_norm(x, list(shape[1:]), weight, 1e-6), x, weight, gradient=gradient)
    theirs = _trained(
        lambda: functional.rms_norm(x.float(), shape[1:], weight, 1e-6).to(dtype), x, weight, gradient=gradient
    )
    # torch's kernel takes input and weight of one dtype, so that the weight is rounded, as with fold="kernel".
    fused = _trained(lambda: functional.rms_norm(x, shape[1:], weight.to(dtype), 1e-6), x, weight, gradient=gradient)
    return {TRITON: ours, PARTS: ours, TORCH: theirs, FUSED: fused}


def _trained(forward: Callable[[], Tensor], *leaves: Tensor, gradient: Tensor | None = None) -> Callable[[], object]:
    return lambda: torch.autograd.grad(forward(), leaves, gradient)
