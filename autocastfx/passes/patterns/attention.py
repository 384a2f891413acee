"""Scaled dot-product attention as models write it out, and where torch's operator computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from autocastfx.graph.node import example, tensors
from autocastfx.passes.patterns.pattern import Arguments, Found

__all__ = ["NUMBERS", "arguments", "formulas"]

NUMBERS = frozenset(("scale", "divisor", "dim", "first", "second"))

Scaled = Callable[[Any, Any, Any], Any]


def formulas(*, masked: bool) -> tuple[Callable[..., Any], ...]:
    """Scores scaled in some way, their softmax with or without a dtype, and dropout that drops nothing, or none."""
    scaled: tuple[Scaled, ...] = (
        lambda scores, scale, divisor: scores * scale,
        lambda scores, scale, divisor: scores / divisor,
        lambda scores, scale, divisor: scores,
    )
    softmax: tuple[Callable[[Any, Any], Any], ...] = (
        lambda scores, dim: torch.ops.aten.softmax.int(scores, dim, torch.float32),
        lambda scores, dim: torch.ops.aten.softmax.int(scores, dim),
    )
    dropped: tuple[Callable[[Any], Any], ...] = (lambda y: y, lambda y: torch.dropout(y, 0.0, True))
    return tuple(_attention(*parts, masked=masked) for parts in product(scaled, softmax, dropped))


def _attention(
    scaled: Scaled, softmax: Callable[[Any, Any], Any], dropped: Callable[[Any], Any], *, masked: bool
) -> Callable[..., Any]:
    def scores(q: Any, k: Any, first: Any, second: Any, scale: Any, divisor: Any) -> Any:
        return scaled(torch.matmul(q, k.transpose(first, second)), scale, divisor)

    def of_all(q: Any, k: Any, v: Any, first: Any, second: Any, scale: Any, divisor: Any, dim: Any) -> Any:
        return torch.matmul(dropped(softmax(scores(q, k, first, second, scale, divisor), dim)), v)

    def of_some(q: Any, k: Any, v: Any, mask: Any, first: Any, second: Any, scale: Any, divisor: Any, dim: Any) -> Any:
        return torch.matmul(dropped(softmax(scores(q, k, first, second, scale, divisor) + mask, dim)), v)

    return of_some if masked else of_all


def arguments(found: Found) -> Arguments | None:
    """Of ``scaled_dot_product_attention``, where it gives what is written out.

    Batches and heads must be the same for query, key and value; a mask must have the sizes of the scores, or 1. The
    pattern asks that it is made of finite numbers: where a row is masked by -inf alone, what is written out gives NaN
    and the operator 0. What this cannot see is a row that finfo.min masks whole: its result is the same, its gradient
    is not.
    """
    q, k, v = (tensors(found[name])[0] for name in "qkv")
    scale = 1 / found["divisor"] if _is_number(found.get("divisor")) else found.get("scale", 1.0)
    written = [found["first"], found["second"], found["dim"]]
    if q.ndim != 4 or not _is_number(scale) or not all(isinstance(dim, int) for dim in written):
        return None
    first, second, dim = (n % q.ndim for n in written)
    if {first, second} != {2, 3} or dim != 3 or not _sizes(q)[:2] == _sizes(k)[:2] == _sizes(v)[:2]:
        return None
    mask = found.get("mask")
    if mask is not None:
        scores, sizes = (*q.shape[:3], k.shape[2]), tensors(mask)[0].shape
        # In the example; that the mask was added says that it fits other sizes, too.
        fits = len(sizes) == 4 and all(
            example(n) in (example(whole), 1) for n, whole in zip(sizes, scores, strict=True)
        )
        if not fits:
            return None
    return (found["q"], found["k"], found["v"], mask), {"scale": float(scale)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0 and math.isfinite(value)


def _sizes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Sizes as text: comparing symbols would add conditions to the graph."""
    return tuple(str(size) for size in tensor.shape)
