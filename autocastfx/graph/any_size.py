"""Abstract results for any size, of operators whose own abstract results in torch ask about sizes.

torch unrolls the loop of ``lstm``, ``gru`` and ``rnn`` over the length, and asks of ``linear`` whether its input is
contiguous, which a size of 1 decides. A graph captured so holds for that length, or that size, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["RECURRENT", "any_size"]

_aten: Any = torch.ops.aten


def _input(
    input: Tensor,
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    steps, batch = (1, 0) if batch_first else (0, 1)
    return _results(input, (input.shape[steps], input.shape[batch]), hidden, weights, bidirectional, batch_first)


def _packed(
    data: Tensor,
    batch_sizes: Tensor,
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    return _results(data, (data.shape[0],), hidden, weights, bidirectional, False)


def _results(
    input: Tensor,
    sizes: tuple[Any, ...],
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    read = [input, *states, *weights]
    if differing := {t.dtype for t in read} - {input.dtype}:
        raise RuntimeError(f"a recurrent layer takes one dtype, not {input.dtype} and {differing.pop()}")
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    output = input.new_empty((*sizes, width))
    found = (output.transpose(0, 1) if batch_first else output, *map(torch.empty_like, states))
    return tuple(_made_of(t, read) for t in found)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim != 2 or input.ndim == 0 or input.dtype != weight.dtype or input.layout != torch.strided:
        product = input @ weight.t()  # which says what is wrong, if something is
        return product if bias is None else product + bias
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: f"linear: a last size of {input.shape[-1]} does not fit a weight of size {list(weight.shape)}",
    )
    output = input.new_empty((*input.shape[:-1], weight.shape[0]))
    return _made_of(output, [input, weight] if bias is None else [input, weight, bias])


def _made_of(output: Tensor, read: Sequence[Tensor]) -> Tensor:
    """Let autograd see where ``output`` comes from."""
    learning = next((t for t in read if t.requires_grad), None)
    return output if learning is None or not torch.is_grad_enabled() else output + learning.sum()


RECURRENT: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    getattr(getattr(_aten, name), overload): rule
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload, rule in (("input", _input), ("data", _packed))
}


_ANY_SIZE = {**RECURRENT, _aten.linear.default: _linear}


@contextmanager
def any_size() -> Generator[None, None, None]:
    """While open, torch's Python dispatcher, which only tracers use, takes these results."""
    key = cast("Any", torch._C).DispatchKey
    keys = (key.Autograd, key.CompositeImplicitAutograd, key.Meta)
    before = [(op, dict(op.py_kernels)) for op in _ANY_SIZE]
    try:
        for op, rule in _ANY_SIZE.items():
            op.py_kernels.update(dict.fromkeys(keys, rule))
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in before:
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
